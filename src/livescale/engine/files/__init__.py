"""A model's files, its configuration, and the modules that they fit."""
