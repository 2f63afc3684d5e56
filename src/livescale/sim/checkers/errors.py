"""What a broken rule of a simulated world raises."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """A rule does not hold in a simulated world."""


class UnexplainedFailure(InvariantBroken):
    """A request failed, and nothing in its world made that inevitable."""
