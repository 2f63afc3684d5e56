"""Live scaling of one instance from another, beside stop-the-world."""
