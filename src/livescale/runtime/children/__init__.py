"""How processes of a pool are started, kept, and started again."""
