"""Machines that join a pool which runs elsewhere."""
