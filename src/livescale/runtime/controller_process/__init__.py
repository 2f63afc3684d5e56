"""The process of the controller, and its wires to everybody else."""
