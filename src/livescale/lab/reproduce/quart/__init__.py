"""QUART's claims."""
