"""Products with matrices: which implementation, and how fast each is here."""
