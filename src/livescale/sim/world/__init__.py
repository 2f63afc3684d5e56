"""The simulated world: members, gateways, faults, lives of the controller."""
