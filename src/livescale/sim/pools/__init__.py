"""Simulated pools from cluster files, models and systems, and the search for their capacity."""
