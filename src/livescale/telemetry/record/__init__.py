"""Records of controllers on disk: their lines, files and ends."""
