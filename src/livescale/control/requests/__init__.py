"""Requests, their attempts, and who gets them."""
