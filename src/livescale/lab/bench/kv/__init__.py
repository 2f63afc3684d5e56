"""KV that is handed over between instances."""
