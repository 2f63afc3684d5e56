"""Measuring claims: which ones, one after the other, and what cannot be measured here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from livescale.reproduce.claim import AbsentError, Claim, Conditions, Reproduction, Verdict
from livescale.reproduce.table import CLAIMS
from livescale.traces import TraceError


class UnknownClaimError(ValueError):
    """There is no claim of that id; the message names the nearest."""


def choose(ids: Sequence[str]) -> list[Claim]:
    """The claims of these ids (in any case), in the table's order; none: all of them.

    Raises UnknownClaimError.
    """
    wanted = [name.upper() for name in ids]
    for name in wanted:
        if name not in CLAIMS:
            near = difflib.get_close_matches(name, CLAIMS, 3, 0.4)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            raise UnknownClaimError(f"there is no claim '{name}'{hint}; {', '.join(CLAIMS)}")
    return [claim for name, claim in CLAIMS.items() if not wanted or name in wanted]


def reproduce(
    claims: Sequence[Claim],
    conditions: Conditions,
    on_start: Callable[[Claim], None] = lambda claim: None,
) -> Reproduction:
    """Measure the claims one after the other; what lacks its data is listed as absent."""
    found = Reproduction()
    for claim in claims:
        on_start(claim)
        try:
            measured = claim.measure(conditions)
        except (AbsentError, TraceError) as error:
            found.absent[claim.id] = str(error)
        else:
            found.verdicts.append(Verdict.of(claim, measured))
    return found
