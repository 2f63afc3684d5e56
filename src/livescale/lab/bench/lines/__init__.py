"""Pipelines: stages that scale by themselves, teams that serve while they load."""
