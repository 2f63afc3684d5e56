"""Drawings: lanes, series, keys."""
