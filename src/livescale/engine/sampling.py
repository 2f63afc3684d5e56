"""From logits to tokens: a pure function of logits, parameters, history, seed and position.

The raw logits give the logprobs; `logits.py` and `cuts.py` say what the parameters make of a row,
`noise.py` how a token is drawn from it. No layers, no KV cache, no batching.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from livescale.batching.run import Segment
from livescale.engine.cuts import Candidates, candidates, is_narrow
from livescale.engine.logits import adjust, is_adjusting, scale
from livescale.engine.noise import noise_bits, noise_key, race
from livescale.types import RequestId, TokenLogprobs

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
