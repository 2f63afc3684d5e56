"""Peers with an engine in them."""
