"""What the papers claim, measured here: claims as values, and the figures that we get for them."""
