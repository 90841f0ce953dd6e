"""The shared-storage engine: a dense block and its consumer as one PyTorch operator."""
