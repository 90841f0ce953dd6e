"""The few operations that the shared engine is made of."""
