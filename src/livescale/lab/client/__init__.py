"""Clients of an OpenAI-compatible server: they talk HTTP and know nothing of the pool behind it."""
