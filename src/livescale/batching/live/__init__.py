"""Two instances share the layers of one while it loads; KV moves between any two."""
