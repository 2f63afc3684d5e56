"""The settings of a pool by group; each adds its own to those of the one before."""
