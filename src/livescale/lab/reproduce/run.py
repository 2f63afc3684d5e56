"""All claims in the papers' order, measured, and what cannot be measured here.

Tolerances were set before anything was measured; a claim that does not come out stays as it is.
Ids: B for BlitzScale, L for λScale, Q for QUART, N for what is in no paper.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from livescale.lab.reproduce.base.claim import (
    Claim,
    Conditions,
    Measured,
    Reproduction,
    Verdict,
)
from livescale.lab.reproduce.base.processes import results
from livescale.lab.reproduce.blitzscale import (
    blitzscale_baselines,
    blitzscale_bursts,
    blitzscale_live,
    blitzscale_loads,
    blitzscale_network,
    blitzscale_plans,
    blitzscale_pools,
    full_provisioning,
)
from livescale.lab.reproduce.lambdascale import (
    chain_or_teams,
    lambdascale_multicast,
    lambdascale_scaling,
    lambdascale_switch,
    lambdascale_teams,
)
from livescale.lab.reproduce.quart import (
    quart,
    quart_bursts,
    quart_pools,
    quart_rules,
    quart_stages,
)

_MODULES = (
    blitzscale_baselines,
    blitzscale_bursts,
    blitzscale_live,
    blitzscale_loads,
    blitzscale_network,
    blitzscale_plans,
    blitzscale_pools,
    full_provisioning,
    chain_or_teams,
    lambdascale_multicast,
    lambdascale_scaling,
    lambdascale_switch,
    lambdascale_teams,
    quart,
    quart_bursts,
    quart_pools,
    quart_rules,
    quart_stages,
)
ALL = "all"
"""In place of ids: every claim."""
_FOUND = (found for module in _MODULES for found in vars(module).values())
_MEASURED = [found for found in _FOUND if isinstance(found, Claim)]
CLAIMS = {c.id: c for c in sorted(_MEASURED, key=lambda claim: (claim.id[0], int(claim.id[1:])))}


class UnknownClaimError(ValueError):
    """There is no claim of that id; the message names the nearest."""


def choose(ids: Sequence[str]) -> list[Claim]:
    """The claims of these ids (in any case), in the table's order; none, or ALL: all of them.

    Raises UnknownClaimError.
    """
    wanted = [name.upper() for name in ids if name.lower() != ALL]
    for name in wanted:
        if name not in CLAIMS:
            near = difflib.get_close_matches(name, CLAIMS, 3, 0.4)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            raise UnknownClaimError(f"there is no claim '{name}'{hint}; {', '.join(CLAIMS)}")
    is_all = len(wanted) < max(len(ids), 1)
    return [claim for name, claim in CLAIMS.items() if is_all or name in wanted]


def reproduce(
    claims: Sequence[Claim],
    conditions: Conditions,
    on_start: Callable[[Claim], None] = lambda claim: None,
    processes: int = 1,
) -> Reproduction:
    """Measure the claims, one after the other or in so many processes; what lacks its data is
    listed as absent. `on_start` comes before the wait for a claim's figures."""
    found = Reproduction()
    with results(_measure, [claim.id for claim in claims], conditions, processes) as measured:
        for claim in claims:
            on_start(claim)
            figures = measured(claim.id)
            if isinstance(figures, str):
                found.absent[claim.id] = figures
            else:
                found.verdicts.append(Verdict.of(claim, figures))
    return found


def _measure(name: str, conditions: Conditions) -> Measured:
    return CLAIMS[name].measure(conditions)
