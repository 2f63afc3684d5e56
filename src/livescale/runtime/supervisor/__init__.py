"""Who owns the processes of one host, and of a pool."""
