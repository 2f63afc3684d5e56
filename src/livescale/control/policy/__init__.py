"""How many instances a load needs, and which copies hosts should have: pure suggestions."""
