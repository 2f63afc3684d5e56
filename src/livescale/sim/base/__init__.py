"""Virtual time, and values that shape a world."""
