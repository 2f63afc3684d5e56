"""The KL descent of QUART §6.2 (Eqs 8 to 10): from where a stage is to where it should be.

As printed the descent leaves the simplex after one step (Eq. 9's constant 1 alone moves every
entry); here each step is projected back. With Q uniform the optimum is known without any descent:
the most even spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_STEPS_MAX = 2000
_CONVERGED = 1e-12
_LEAST = 1e-9
"""No entry of P falls below: the logarithm of Eq. 9 needs more than nothing."""


def kl_divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """Eq. 8 for one stage: sum of P log(P / Q), where nothing times log nothing is nothing."""
    return sum(its * math.log(its / aim) for its, aim in zip(p, q, strict=True) if its > 0)


def on_simplex(values: Sequence[float]) -> list[float]:
    """The point nearest to `values` with entries of at least 0 and a sum of 1."""
    shift, total = 0.0, 0.0
    for count, value in enumerate(sorted(values, reverse=True), 1):
        total += value
        if value - (total - 1) / count <= 0:
            break
        shift = (total - 1) / count
    return [max(value - shift, 0.0) for value in values]


def descend(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """P after Eq. 10 has been repeated until the divergence from Q changes no more.

    Both have an entry per host; Q's are positive. The learning rate is 1, and for each step is
    halved until the divergence falls: near the edges the gradient has no bound, and any fixed rate
    may jump between two of them for ever.
    """
    if not q or min(q) <= 0:
        raise ValueError("Q must be positive everywhere")
    now = _inside(p)
    for _ in range(_STEPS_MAX):
        following = _step(now, q)
        if following is None:
            break
        now = following
    return now


def _step(p: Sequence[float], q: Sequence[float]) -> list[float] | None:
    """Eq. 10 once; None: no rate makes the divergence smaller by more than `_CONVERGED`."""
    slopes = [1 + math.log(its / aim) for its, aim in zip(p, q, strict=True)]
    divergence, rate = kl_divergence(p, q), 1.0
    while rate > _LEAST:
        found = _inside([its - rate * slope for its, slope in zip(p, slopes, strict=True)])
        if kl_divergence(found, q) < divergence - _CONVERGED:
            return found
        rate /= 2
    return None


def _inside(values: Sequence[float]) -> list[float]:
    """On the simplex, and off its edges."""
    raised = [max(value, _LEAST) for value in on_simplex(values)]
    total = sum(raised)
    return [value / total for value in raised]
