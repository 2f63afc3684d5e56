"""Processes of other systems that load one model from a pool."""
