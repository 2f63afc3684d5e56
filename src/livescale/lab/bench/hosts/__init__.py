"""Hosts that join, and what their wires cost."""
