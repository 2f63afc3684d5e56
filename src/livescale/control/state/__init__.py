"""What the controller knows: workers, instances, copies, models."""
