"""The real world: processes, sockets, clocks. Decisions live in `control` and `batching`."""
