"""`livescale bench`: a parser for each part."""
