"""The simulated world: members, gateway, faults, lives of the controller."""
