"""Commands of the laboratory: thin skins, as `cli` has for the product."""
