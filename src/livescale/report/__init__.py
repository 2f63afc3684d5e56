"""Figures from measured requests, and plain text to show them."""
