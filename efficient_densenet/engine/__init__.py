"""How a dense block is run: the engines, and the dispatcher that chooses between them."""
