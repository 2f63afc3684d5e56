"""What a gateway counts, and the page of that."""
