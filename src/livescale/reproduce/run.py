"""All claims in the papers' order, measured one after the other, and what cannot be measured here.

Tolerances were set before anything was measured; a claim that does not come out stays as it is.
Ids: B for BlitzScale, L for λScale, Q for QUART.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from livescale.load.traces import TraceError
from livescale.reproduce import (
    blitzscale_baselines,
    blitzscale_bursts,
    blitzscale_live,
    blitzscale_loads,
    blitzscale_plans,
    blitzscale_pools,
    lambdascale_multicast,
    lambdascale_scaling,
    quart,
)
from livescale.reproduce.claim import AbsentError, Claim, Conditions, Reproduction, Verdict

_MODULES = (
    blitzscale_baselines,
    blitzscale_bursts,
    blitzscale_live,
    blitzscale_loads,
    blitzscale_plans,
    blitzscale_pools,
    lambdascale_multicast,
    lambdascale_scaling,
    quart,
)
_FOUND = (found for module in _MODULES for found in vars(module).values())
_MEASURED = [found for found in _FOUND if isinstance(found, Claim)]
CLAIMS = {c.id: c for c in sorted(_MEASURED, key=lambda claim: (claim.id[0], int(claim.id[1:])))}


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
