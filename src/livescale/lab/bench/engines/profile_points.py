"""What `bench profile` measures, and how operations follow from the times of whole Runs.

An executor computes whole Runs; a profile wants operations. Attention of decodes costs so much per
token that is read, as Runs that differ in nothing else tell; that of a chunk is what grows with the
square of its size. Decodes without head and attention are the linear layers of few tokens, chunks
without attention those of many. The operation is called ALL_BUT_ATTENTION, for that is what it is:
launches, norms and the embedding are in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from livescale.clusters.profiles import HEAD, AttentionPoint, LinearPoint, OpProfile
from livescale.latency.curves import TimeCurve
from livescale.latency.work import RunWork
from livescale.values.types import Value

ALL_BUT_ATTENTION = "all_but_attention"
CONTEXT_TOKENS_MIN = 16
_CONTEXT_STEP = 4
_FIT_POINTS_MIN = 4
_SQUARE_SHARE_MAX = 0.9
_NOISE_SHARE, _NOISE_FACTOR_MAX = 0.01, 4
"""What a difference of noisy times is at least: of the whole, and below what was expected."""


class TimedRun(Value, frozen=True):
    """One Run to be timed: chunks (new tokens, tokens before them) that do not sample, and decodes
    that all attend to `context` tokens."""

    prefills: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    context: int = 1
    samples: bool = True

    @property
    def work(self) -> RunWork:
        sampled = self.decodes if self.samples else 0
        return RunWork(self.prefills, self.decodes, self.decodes * self.context, sampled)

    @property
    def context_tokens(self) -> int:
        """Positions whose KV is written or read."""
        return sum(map(sum, self.prefills)) + self.decodes * self.context

    @property
    def kind(self) -> str:
        if not self.decodes:
            return "prefill"
        return "mixed" if self.prefills else "decode"


class ProfileLimits(Value, frozen=True):
    """How far the grid goes."""

    chunk_tokens_max: int
    decodes_max: int
    context_tokens_max: int

    @property
    def decodes(self) -> list[int]:
        return _steps(1, self.decodes_max, 2)

    @property
    def chunks(self) -> list[int]:
        return _steps(1, self.chunk_tokens_max, 2)

    @property
    def contexts(self) -> list[int]:
        return _steps(CONTEXT_TOKENS_MIN, self.context_tokens_max, _CONTEXT_STEP)

    def before(self, chunk: int) -> int:
        """Tokens before a chunk, where its attention is to be seen: as many, if there is room."""
        return min(chunk, self.context_tokens_max - chunk)

    def grid(self) -> Iterator[TimedRun]:
        """Every Run that the profile is made of."""
        for chunk in self.chunks:
            yield TimedRun(((chunk, 0),))
            if self.before(chunk) > 0:
                yield TimedRun(((chunk, self.before(chunk)),))
        for decodes in self.decodes:
            yield TimedRun((), decodes, CONTEXT_TOKENS_MIN, samples=False)
            for context in self.contexts:
                yield TimedRun((), decodes, context)

    def held_out(self) -> Iterator[TimedRun]:
        """Runs between the grid's, of which the profile knows nothing."""
        chunks = [3 * chunk // 2 for chunk in self.chunks if 16 <= chunk < self.chunk_tokens_max]
        decodes = [3 * n // 2 for n in self.decodes if 2 <= n < self.decodes_max]
        contexts = [2 * c for c in self.contexts if c < self.contexts[-1]]
        for number, chunk in enumerate(chunks):
            yield TimedRun(((chunk, 0),))
            before = min(2 * chunk, self.context_tokens_max - chunk)
            if before > 0:
                yield TimedRun(((chunk, before),))
            if decodes and contexts:
                # Sizes that do not rise together.
                beside = decodes[-1 - number % len(decodes)]
                yield TimedRun(((chunk, 0),), beside, contexts[number % len(contexts)])
        for n in decodes:
            for context in contexts:
                yield TimedRun((), n, context)


class ProfiledModel(Value, frozen=True):
    """The model that is profiled, and what it runs on."""

    gpu: str
    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def linear(self, tokens: int, op: str, ns: float) -> LinearPoint:
        """An operation on so many rows; what noise makes negative is as good as nothing."""
        return LinearPoint(self.gpu, self.name, 1, tokens, {op: max(1, round(ns))})

    def attention(self, kind: str, batch: int, context: int, run_ns: float) -> AttentionPoint:
        """One layer's part of the attention of a Run."""
        sizes = (self.heads, self.kv_heads, self.head_dim)
        layer_ns = max(1, round(run_ns / self.layers))
        return AttentionPoint(self.gpu, kind, batch, context, *sizes, layer_ns)


def operations(
    times_ns: Mapping[TimedRun, int], limits: ProfileLimits, model: ProfiledModel
) -> OpProfile:
    """The profile that the measured Runs of the grid give; Runs that were not measured are left
    out, with what depends on them."""
    linear_ns, heads, decoding = _of_decodes(times_ns, limits, model)
    chunks_ns, extending = _of_chunks(times_ns, limits, model, linear_ns)
    linear = [
        model.linear(tokens, ALL_BUT_ATTENTION, layers_ns / model.layers)
        for tokens, layers_ns in sorted({**chunks_ns, **linear_ns}.items())
    ]
    return OpProfile((*linear, *heads), (*decoding, *extending), model.layers)


# -- helpers, in the order used -------------------------------------------------------------------


def _of_decodes(
    times_ns: Mapping[TimedRun, int], limits: ProfileLimits, model: ProfiledModel
) -> tuple[dict[int, float], list[LinearPoint], list[AttentionPoint]]:
    """From Runs of decodes: all layers without attention by tokens, heads, attention."""
    linear_ns: dict[int, float] = {}
    heads: list[LinearPoint] = []
    attention: list[AttentionPoint] = []
    token_ns = _slope(_longer_contexts(times_ns, limits))
    for decodes in limits.decodes:
        bare_ns = times_ns.get(TimedRun((), decodes, CONTEXT_TOKENS_MIN, samples=False))
        by_context = _by_context(times_ns, limits, decodes)
        if bare_ns is None or CONTEXT_TOKENS_MIN not in by_context:
            continue
        least_ns = by_context[CONTEXT_TOKENS_MIN]
        first_ns = token_ns * decodes * CONTEXT_TOKENS_MIN
        linear_ns[decodes] = max(bare_ns - first_ns, (1 - _SQUARE_SHARE_MAX) * bare_ns)
        head_ns = max(least_ns - bare_ns, _NOISE_SHARE * bare_ns)
        heads.append(model.linear(decodes, HEAD, head_ns))
        for context, run_ns in by_context.items():
            expected_ns = token_ns * decodes * context
            attending_ns = max(run_ns - least_ns + first_ns, expected_ns / _NOISE_FACTOR_MAX)
            attention.append(model.attention("decode", decodes, context, attending_ns))
    return linear_ns, heads, attention


def _of_chunks(
    times_ns: Mapping[TimedRun, int],
    limits: ProfileLimits,
    model: ProfiledModel,
    known_ns: Mapping[int, float],
) -> tuple[dict[int, float], list[AttentionPoint]]:
    """From chunks of prompts: all layers without attention by tokens, and attention; without
    attention they take what is `known_ns`, where it is."""
    runs = {chunk: TimedRun(((chunk, 0),)) for chunk in limits.chunks}
    chunks_ns = {chunk: times_ns[run] for chunk, run in runs.items() if run in times_ns}
    shares = _square_shares(chunks_ns)
    linear_ns: dict[int, float] = {}
    attended_ns: dict[int, float] = {}
    extended_ns: dict[int, float] = {}
    for chunk, alone_ns in chunks_ns.items():
        square_ns = alone_ns * shares[chunk]
        before = limits.before(chunk)
        later_ns = times_ns.get(TimedRun(((chunk, before),))) if before else None
        if later_ns is not None:
            # The same chunk later in a prompt has that many pairs more: a second opinion.
            own_ns = (later_ns - alone_ns) * chunk / (2 * before)
            square_ns = min(square_ns, max(own_ns, square_ns / _NOISE_FACTOR_MAX))
        linear_ns[chunk] = known_ns.get(chunk, alone_ns - square_ns)
        attended_ns[chunk] = max(alone_ns - linear_ns[chunk], square_ns)
        if later_ns is not None:
            prompt = round(math.sqrt(chunk * (chunk + 2 * before)))
            extended_ns[prompt] = later_ns - linear_ns[chunk]
    points = [model.attention("prefill", 1, *point) for point in attended_ns.items()]
    if attended_ns:
        prompts = TimeCurve.of(attended_ns.items())
        for prompt, attending_ns in extended_ns.items():
            prompt_ns = prompts.value(prompt)
            beyond_ns = max(attending_ns - prompt_ns, _NOISE_SHARE * prompt_ns)
            points.append(model.attention("extend", 1, prompt, beyond_ns))
    return linear_ns, points


def _by_context(
    times_ns: Mapping[TimedRun, int], limits: ProfileLimits, decodes: int
) -> dict[int, int]:
    runs = {context: TimedRun((), decodes, context) for context in limits.contexts}
    return {context: times_ns[run] for context, run in runs.items() if run in times_ns}


def _longer_contexts(
    times_ns: Mapping[TimedRun, int], limits: ProfileLimits
) -> Iterator[tuple[int, int]]:
    """(tokens read more, nanoseconds more) than with the shortest context."""
    for decodes in limits.decodes:
        by_context = _by_context(times_ns, limits, decodes)
        least_ns = by_context.pop(CONTEXT_TOKENS_MIN, None)
        if least_ns is not None:
            for context, run_ns in by_context.items():
                yield decodes * (context - CONTEXT_TOKENS_MIN), run_ns - least_ns


def _square_shares(chunks_ns: Mapping[int, int]) -> dict[int, float]:
    """Which part of each chunk's time grows with the square of its size: the closest sum of a fixed
    time, a time per token and a time per pair, by relative least squares."""
    if len(chunks_ns) < _FIT_POINTS_MIN:
        return dict.fromkeys(chunks_ns, 0.0)
    sizes, times = (np.array(list(part), float) for part in (chunks_ns, chunks_ns.values()))
    terms = np.stack([np.ones_like(sizes), sizes, sizes**2], axis=1)
    factors, *_ = np.linalg.lstsq(terms / times[:, None], np.ones_like(times))
    shares = np.clip(factors[2] * sizes**2 / times, 0.0, _SQUARE_SHARE_MAX)
    return dict(zip(chunks_ns, shares.tolist(), strict=True))


def _slope(points: Iterable[tuple[int, int]]) -> float:
    """Least squares through the origin, so that the largest differences count most."""
    pairs = list(points)
    squares = sum(x * x for x, _ in pairs)
    return max(0.0, sum(x * y for x, y in pairs) / squares) if squares else 0.0


def _steps(first: int, last: int, factor: int) -> list[int]:
    """Sizes from first on, by a factor, and the last one."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]
