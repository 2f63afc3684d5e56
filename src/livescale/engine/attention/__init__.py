"""Attention and its KV cache."""
