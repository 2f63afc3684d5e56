"""Instances of which each has a part of the layers: stages, teams, and visitors among them."""
