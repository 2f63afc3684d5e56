"""From logits to tokens: a pure function of logits, parameters, history, seed and position.

The raw logits give the logprobs; `logits.py` and `cuts.py` have what the parameters make of a row.
A token is drawn with noise that depends on a seed, a position and a token id only. Counters instead
of a generator's state: whatever else is in the batch, on whichever instance and attempt a token is
chosen, its noise is the same. No layers, no KV cache, no batching.

The choice is a race (the Gumbel-max trick): token i with weight w_i arrives at E_i / w_i, where
E_i = -log(1 - u_i) is exponential, and the first to arrive wins, with probability w_i / sum(w).
The uniform u_i = (bits_i + 1/2) / 2**32 is made of 32 bits that `noise_bits` hashes with integers
alone, so every device gets the same ones. Probabilities below 1e-9 are not resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from livescale.batching.runs.run import Segment
from livescale.engine.sampling.cuts import Candidates, candidates, is_narrow
from livescale.engine.sampling.logits import adjust, is_adjusting, scale
from livescale.values.types import RequestId, TokenLogprobs

_MASK_64 = 2**64 - 1
_NO_SIGN = 0x7FFFFFFF

_LOG_WEIGHT_MIN = -64.0
"""Far below what 32 bits of noise can lift to a win."""

_SLACK = 1 + 1e-4
"""Far above the rounding of fp32 in the first look, so that the winner is among those kept."""


def noise_key(seed: int, position: int) -> int:
    """64 bits that name the noise of one token: splitmix64 over the seed, then the position."""
    return _mix((_mix(seed & _MASK_64) + position) & _MASK_64)


def noise_bits(keys: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """(keys, int32 token ids) int32: 32 uniform bits, which differ between a key's tokens.

    The low half of a key is where its count of token ids starts, the high half enters between the
    two rounds of a 32-bit finalizer (the constants are those of Wellons' `lowbias32`).
    """
    signed = [key - 2**64 if key >> 63 else key for key in keys]
    halves = torch.tensor(signed, device=token_ids.device).view(torch.int32).view(-1, 2, 1)
    # Shifts of int32 drag the sign along: the masks drop it. Products wrap.
    bits = token_ids + halves[:, 0]
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x21F0AAAD
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits ^= halves[:, 1]
    bits *= 0x735A2D97
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    return bits


def race(log_weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """(rows, 1) the column that wins: `log_weights` are fp32 with maximum 0, `bits` their noise.

    Arrivals are compared in float64. Of equal ones the first wins.
    """
    # Logarithms in float64 for a whole vocabulary are slow, and few tokens can win. u < E bounds
    # every arrival from below; who is first by that bound really arrives at some time, and only
    # those whose bound is not later can be faster. 31 bits are enough for a bound, and so is too
    # high a weight: exp is slow where it underflows.
    weights = log_weights.clamp(min=_LOG_WEIGHT_MIN).exp_()
    bounds = (bits & _NO_SIGN).float().add_(0.25).div_(weights)
    winners = bounds.argmin(dim=1, keepdim=True)
    scores = _scores(log_weights.gather(1, winners), bits.gather(1, winners))
    limits = scores.neg_().exp_().mul_(2**31 * _SLACK)
    bounds.scatter_(1, winners, torch.inf)
    close = (bounds.amin(dim=1) <= limits.squeeze(1)).nonzero().flatten()
    if len(close):
        contenders = bounds[close] <= limits[close]
        contenders.scatter_(1, winners[close], True)
        winners[close] = _first(log_weights[close], bits[close], contenders)
    return winners


def _mix(state: int) -> int:
    """One step of splitmix64."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _first(log_weights: torch.Tensor, bits: torch.Tensor, contenders: torch.Tensor) -> torch.Tensor:
    """(rows, 1) the contender of each row that arrives first."""
    rows, columns = contenders.nonzero(as_tuple=True)
    scores = _scores(log_weights[rows, columns], bits[rows, columns])
    best = scores.new_full((len(bits),), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    is_best = scores == best[rows]
    unset = columns.new_full((len(bits),), bits.shape[1])
    return unset.scatter_reduce_(0, rows[is_best], columns[is_best], "amin").unsqueeze(1)


def _scores(log_weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Minus the logarithm of the arrival, in float64: the log-weight plus Gumbel noise."""
    # The sign bit stands last, so that the other 31 alone are a bound from below.
    counts = (bits & _NO_SIGN).double().mul_(2).add_(bits < 0)
    return log_weights.double() - (counts.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()).log_()


TILE_LOGITS = 2**18
"""Logits that are worked on at once: copies of them stay in a core's cache."""

_SPARE = 16
"""Listed beyond the wanted number of likely tokens, for logits equal to the last."""


def choose_tokens(
    logits: torch.Tensor, segments: Sequence[Segment]
) -> tuple[list[int], dict[RequestId, TokenLogprobs]]:
    """One token per sampling segment from its row of `logits` (segments, vocabulary).

    Greedy at temperature 0: the highest logit, of equal ones the lowest id. Else drawn, with the
    noise of the segment's seed and the token's position. No row has an influence on another one.
    """
    assert len(logits) == len(segments), f"{len(logits)} rows for {len(segments)} segments"
    token_ids = _choices(logits, segments)
    return token_ids, _logprobs(logits, segments, token_ids)


def is_plainly_greedy(segment: Segment) -> bool:
    """The highest logit is all that is wanted."""
    sampling = segment.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not is_adjusting(segment)


def final_candidates(logits: torch.Tensor, segments: Sequence[Segment]) -> Candidates:
    """What the segments' tokens are drawn from, none of them greedy. Changes the fp32 `logits`."""
    adjust(logits, segments)
    scale(logits, segments)
    return candidates(logits, [segment.sampling for segment in segments])


# -- helpers, in the order used -------------------------------------------------------------------


def _choices(logits: torch.Tensor, segments: Sequence[Segment]) -> list[int]:
    greedy, narrow, wide = [], [], []
    for row, segment in enumerate(segments):
        if segment.sampling.temperature == 0:
            greedy.append(row)
        elif is_narrow(segment.sampling, logits.shape[1]):
            narrow.append(row)
        else:
            wide.append(row)
    if len(greedy) == len(segments) and not any(map(is_adjusting, segments)):
        # In 16 bits argmax takes five times as long as the conversion and it together.
        return _highest(logits.float(), [])
    ways: list[tuple[list[int], Callable[[torch.Tensor, Sequence[Segment]], list[int]]]]
    ways = [(greedy, _highest), (narrow, _drawn), (wide, _drawn)]
    token_ids = [0] * len(segments)
    for of_way, choose in ways:
        for rows in _tiles(of_way, logits.shape[1]):
            chosen = choose(_copied(logits, rows), [segments[row] for row in rows])
            for row, token_id in zip(rows, chosen, strict=True):
                token_ids[row] = token_id
    return token_ids


def _tiles(rows: Sequence[int], vocabulary: int) -> Iterator[Sequence[int]]:
    rows_max = max(TILE_LOGITS // vocabulary, 1)
    for start in range(0, len(rows), rows_max):
        yield rows[start : start + rows_max]


def _copied(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The rows in fp32, which may be changed."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device)).float()


def _highest(logits: torch.Tensor, segments: Sequence[Segment]) -> list[int]:
    adjust(logits, segments)
    # argmax gives the first of several maxima.
    token_ids: list[int] = logits.argmax(dim=1).tolist()
    return token_ids


def _drawn(logits: torch.Tensor, segments: Sequence[Segment]) -> list[int]:
    token_ids, log_weights = final_candidates(logits, segments)
    keys = [noise_key(s.sampling.seed, s.context_tokens) for s in segments]
    winners = race(log_weights, noise_bits(keys, token_ids))
    drawn: list[int] = token_ids.expand(log_weights.shape).gather(1, winners).flatten().tolist()
    return drawn


def _logprobs(
    logits: torch.Tensor, segments: Sequence[Segment], token_ids: Sequence[int]
) -> dict[RequestId, TokenLogprobs]:
    """Logprobs of those that want them, from logits that nothing has changed."""
    wanting = [row for row, segment in enumerate(segments) if segment.sampling.logprobs is not None]
    found = {}
    for rows in _tiles(wanting, logits.shape[1]):
        tile = _copied(logits, rows)
        normalizers = tile.logsumexp(dim=1).tolist()
        for raw, row, normalizer in zip(tile, rows, normalizers, strict=True):
            likely = _most_likely(raw, segments[row].sampling.logprobs or 0)
            found[segments[row].request] = TokenLogprobs(
                float(raw[token_ids[row]]) - normalizer,
                tuple((token_id, logit - normalizer) for token_id, logit in likely),
            )
    return found


def _most_likely(raw: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """(token id, logit) of the `count` highest logits, of equal ones the lowest ids first."""
    if count == 0:
        return []
    listed = min(count + _SPARE, len(raw))
    count = min(count, len(raw))
    highest, ids = raw.topk(listed)
    if listed < len(raw) and highest[-1] == highest[count - 1]:
        # topk leaves open which of equal logits it lists.
        ids = (raw >= highest[count - 1]).nonzero().flatten()
        highest = raw[ids]
    likely = zip(ids.tolist(), highest.tolist(), strict=True)
    return sorted(likely, key=lambda pair: (-pair[1], pair[0]))[:count]
