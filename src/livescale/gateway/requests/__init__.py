"""One request from its body to the last byte of its answer."""
