"""How a dense block is run: the engines, and what chooses between them."""
