"""What members report, and what others may know of the controller."""
