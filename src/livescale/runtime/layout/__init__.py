"""How a pool lies on its machines: hosts, workers, and the interpreters that these run in."""
