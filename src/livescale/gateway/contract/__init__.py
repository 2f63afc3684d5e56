"""What the gateway promises clients and needs from the rest of LiveScale."""
