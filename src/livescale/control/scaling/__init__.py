"""Which models grow and shrink, and the orders for that."""
