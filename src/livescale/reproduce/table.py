"""All claims that can be measured, in the papers' order.

Tolerances were set before anything was measured; a claim that does not come out stays as it is.
Ids: B for BlitzScale, L for λScale, Q for QUART.
"""

from __future__ import annotations

from livescale.reproduce.claim import Claim
from livescale.reproduce.claims_absorbed import LAMBDASCALE, QUART
from livescale.reproduce.claims_blitzscale import BLITZSCALE
from livescale.reproduce.claims_live import LIVE

_BY_PAPER = (sorted((*LIVE, *BLITZSCALE), key=lambda c: int(c.id[1:])), LAMBDASCALE, QUART)
CLAIMS: dict[str, Claim] = {claim.id: claim for claims in _BY_PAPER for claim in claims}
