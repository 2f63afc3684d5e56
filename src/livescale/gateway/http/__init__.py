"""HTTP itself: the server, bodies, ids, TLS, pages."""
