"""What one record says, in figures."""
