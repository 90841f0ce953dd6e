"""What chooses tiles and launches the kernels for GPUs."""
