"""What measures LiveScale, and what LiveScale does not run on."""
