"""Layers one after another, as modules of torch or as one compiled call."""
