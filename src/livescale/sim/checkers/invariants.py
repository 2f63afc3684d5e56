"""What must hold in every simulated world. A broken rule raises at once; nothing is repaired.

The rules are stated from the outside, from events, commands and what workers do, so that they
share no code with what they check.
"""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """A rule does not hold in a simulated world."""


class UnexplainedFailure(InvariantBroken):
    """A request failed, and nothing in its world made that inevitable."""


def require(holds: bool, rule: str, *what: object) -> None:
    """Raise InvariantBroken with the rule and the values unless it holds."""
    if not holds:
        raise InvariantBroken(f"{rule}: {', '.join(map(repr, what))}")
