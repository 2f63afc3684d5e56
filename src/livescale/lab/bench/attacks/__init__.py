"""Hostile clients and broken models against a pool that serves others."""
