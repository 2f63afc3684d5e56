"""Whole pools: real beside simulated, systems beside each other, gateways under load."""
