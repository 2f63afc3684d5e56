"""Instances that work together: live pairs, teams, roles, pipelines, drains."""
