"""Batch norms that update their running statistics exactly once a step, and synchronized ones."""
