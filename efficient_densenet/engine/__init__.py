"""How a dense block is run: the engines, and the choice between them."""
