"""What bytes and messages cross in simulated worlds: links, flows, channels."""
