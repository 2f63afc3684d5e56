"""Ways for bytes: TCP, sealed TCP, shared memory, NIXL."""
