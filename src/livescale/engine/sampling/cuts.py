"""Which tokens may be drawn: `min_p`, then `top_k`, then `top_p`, each on what is left before it.

Every cut keeps all tokens from some logit on, so equal logits stay or fall together and no order
of sorting matters: the least kept logit decides. It is a function of the row alone, bit
for bit: masses are whole numbers, whose sums do not depend on the order of adding. No noise here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from livescale.values.types import SamplingParams

NARROW_MAX = 256
"""Up to this `top_k` a row's candidates are listed instead of a whole vocabulary masked."""

_SPARE = 16
"""Listed beyond `top_k` for logits equal to the last (usual in bf16); the whole row if more are."""

_MASS_BITS = 40
"""The most likely token's mass is 2**40: 2**22 tokens of it still fit into an int64."""

_BUCKETS = 4096
_BUCKETS_PER_NAT = 128
"""The buckets reach 32 nats below the maximum; below 28 (2**-40) a token has no mass."""


class Candidates(NamedTuple):
    """What a token is drawn from: exp of `log_weights` (rows, n), -inf where a token is cut.

    `token_ids` (int32) are those of each row (rows, n), or the same for all (n).
    """

    token_ids: torch.Tensor
    log_weights: torch.Tensor


def is_narrow(sampling: SamplingParams, vocabulary: int) -> bool:
    """True when few enough tokens are kept to be listed."""
    return 0 < sampling.top_k <= NARROW_MAX and sampling.top_k < vocabulary


def candidates(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> Candidates:
    """What the cuts leave of fp32 rows whose maximum is 0, and which may be changed."""
    if all(is_narrow(sampling, logits.shape[1]) for sampling in samplings):
        listed = _listed(logits, samplings)
        if listed is not None:
            return listed
    _cut(logits, samplings)
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return Candidates(token_ids, logits)


# -- few tokens are left: lists -------------------------------------------------------------------


def _listed(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> Candidates | None:
    """The candidates of rows that are all narrow; None if too many logits equal the k-th."""
    top_k = torch.tensor([[sampling.top_k] for sampling in samplings], device=logits.device)
    count = min(int(top_k.max()) + _SPARE, logits.shape[1])
    falling, token_ids = logits.topk(count, dim=1)
    least = falling.gather(1, top_k - 1)
    if count < logits.shape[1] and bool((falling[:, -1:] == least).any()):
        return None
    _cut_below(falling, torch.maximum(least, _least_by_min_p(logits, samplings)))
    if any(sampling.top_p < 1 for sampling in samplings):
        # A share of 1 keeps what has mass: the rows that want it must keep the rest, too.
        masses = _masses(falling)
        least = _last_before(falling, masses, 0, _wanted(masses, _shares(logits, samplings)))
        cuts = torch.tensor([[sampling.top_p < 1] for sampling in samplings], device=logits.device)
        _cut_below(falling, least.where(cuts, -math.inf))
    return Candidates(token_ids.int(), falling)


# -- many are left: whole rows --------------------------------------------------------------------


def _cut(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> None:
    """What is cut is -inf."""
    vocabulary = logits.shape[1]
    with_top_k = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocabulary]
    with_top_p = [row for row, s in enumerate(samplings) if s.top_p < 1]
    if not with_top_k and not with_top_p and all(s.min_p == 0 for s in samplings):
        return
    least = _least_by_min_p(logits, samplings)
    if with_top_k:
        rows = torch.tensor(with_top_k, device=logits.device)
        top_k = torch.tensor([[samplings[row].top_k] for row in with_top_k], device=logits.device)
        highest = logits.index_select(0, rows).topk(int(top_k.max()), dim=1).values
        least[rows] = torch.maximum(least[rows], highest.gather(1, top_k - 1))
    if with_top_p:
        rows = torch.tensor(with_top_p, device=logits.device)
        left = logits.index_select(0, rows)
        _cut_below(left, least[rows])
        least[rows] = _least_by_top_p(left, _shares(left, [samplings[r] for r in with_top_p]))
    _cut_below(logits, least)


def _least_by_top_p(logits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """(rows, 1) the lowest logit above which there is less than the wanted share of the mass."""
    # Sorting a vocabulary is slow. Masses by bucket tell in which bucket the edge is, and only
    # that bucket is sorted.
    masses = _masses(logits)
    wanted = _wanted(masses, shares)
    buckets = logits.mul(-_BUCKETS_PER_NAT).clamp_(max=_BUCKETS - 1).long()
    filled = masses.new_zeros(len(logits), _BUCKETS).scatter_add_(1, buckets, masses)
    upto = filled.cumsum(dim=1)
    edge = torch.searchsorted(upto, wanted)
    above = upto.gather(1, edge) - filled.gather(1, edge)
    falling = _falling(logits, buckets == edge)
    return _last_before(falling, _masses(falling), above, wanted)


def _falling(logits: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """The members of each row in falling order, filled up with -inf to the longest list."""
    rows, ids = members.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(logits))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    falling = logits.new_full((len(logits), int(counts.max())), -math.inf)
    falling[rows, places] = logits[rows, ids]
    return falling.sort(dim=1, descending=True).values


# -- both ways ------------------------------------------------------------------------------------


def _least_by_min_p(like: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """(rows, 1) the logit of `min_p` times the highest probability."""
    least = [[math.log(s.min_p) if s.min_p > 0 else -math.inf] for s in samplings]
    return torch.tensor(least, dtype=torch.float32, device=like.device)


def _cut_below(logits: torch.Tensor, least: torch.Tensor) -> None:
    """What is below the row's `least` is -inf."""
    # All are 0 or negative and 0 is never cut, so a division by 1 or 0 does it: several times
    # faster than comparing to bool and filling.
    logits.div_(logits.clone().ge_(least))


def _shares(like: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """(rows, 1) `top_p` in float64."""
    top_p = [[sampling.top_p] for sampling in samplings]
    return torch.tensor(top_p, dtype=torch.float64, device=like.device)


def _masses(logits: torch.Tensor) -> torch.Tensor:
    """Whole numbers proportional to the probabilities."""
    return logits.double().exp_().mul_(2.0**_MASS_BITS).long()


def _wanted(masses: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """(rows, 1) the mass that the kept tokens reach; the first one is always kept."""
    return masses.sum(dim=1, keepdim=True).mul(shares).ceil_().long().clamp_(min=1)


def _last_before(
    falling: torch.Tensor, masses: torch.Tensor, above: torch.Tensor | int, wanted: torch.Tensor
) -> torch.Tensor:
    """(rows, 1) the last of the falling logits before which the mass has not reached `wanted`.

    `above` is the mass of what comes before the lists.
    """
    before = masses.cumsum(dim=1) - masses + above
    last = (before < wanted).sum(dim=1, keepdim=True) - 1
    return falling.gather(1, last)
