"""Stages of a pipeline that scale by themselves (QUART §5, §6.2): formulas and decisions.

Nothing here knows the controller. Loads, targets and the time are arguments; what comes back are
values that say why.
"""
