"""What the demos are made of: data, the training loop, and what a run leaves on disk."""
