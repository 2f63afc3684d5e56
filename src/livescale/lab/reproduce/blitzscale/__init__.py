"""BlitzScale's claims and figures (OSDI'25)."""
