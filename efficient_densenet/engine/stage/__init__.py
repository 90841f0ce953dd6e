"""The shared-storage engine: a dense block and what consumes its output as one PyTorch operator."""
