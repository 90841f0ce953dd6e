"""The host code for GPUs: it chooses tiles and launches the kernels."""
