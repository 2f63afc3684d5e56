"""Models of a pool: prepared, published, restored after a restart."""
