"""Connections with peers: what waits on them, and what goes first."""
