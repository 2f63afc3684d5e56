"""The table: how long a transformer takes, from operations that were measured one by one.

Composed as the roofline is: linear layers by the Run's tokens, attention by batch and context,
all-reduces by bytes, then the head. Where a table ends the roofline goes on, from the level that
was measured; logs are never drawn out beyond the last point, which overestimates (+18 % was seen).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from livescale.latency.accelerators import ENGINES
from livescale.latency.curves import TimeCurve, TimeGrid
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import TransformerShape
from livescale.latency.work import RunWork
from livescale.profiles import HEAD, AttentionPoint, OpProfile
from livescale.types import Value

GRAPH_ALL_REDUCE = "aic_vllm_graph"
_BF16_BYTES = 2
_ALL_REDUCES = 2


class TableLatency(Value, frozen=True, tag="table"):
    """One model on one kind of accelerator, by measurement: curves in nanoseconds.

    `linear` is one layer without attention by new tokens; `prefill` and `decode` one layer's
    attention by sequences and their context; `extend` what a chunk with tokens before it takes
    beyond a prompt with as many pairs of positions; `all_reduce` one sum over ranks by bytes, of
    which a token has `token_bytes`; `head` by sampled sequences. What is None is the roofline's
    (`beyond`), or nothing where no roofline is known.
    """

    model: str
    layers: int
    linear: TimeCurve
    prefill: TimeGrid | None = None
    extend: TimeCurve | None = None
    decode: TimeGrid | None = None
    all_reduce: TimeCurve | None = None
    token_bytes: int = 0
    head: TimeCurve | None = None
    iteration_ns: int = 0
    sequence_ns: int = 0
    beyond: RooflineLatency | None = None

    @classmethod
    def of(
        cls,
        profile: OpProfile,
        gpu: str,
        shape: TransformerShape,
        tp_size: int = 1,
        model: str | None = None,
    ) -> TableLatency:
        """The shape on `tp_size` known accelerators, under an engine that uses graphs.

        `model` is what the profile calls it, if not by the shape's name. Raises ValueError when
        the profile has no linear layers of it, and for what the roofline does not know.
        """
        roofline = RooflineLatency.of(gpu, shape, tp_size)
        heads = (shape.heads // tp_size, shape.kv_heads_of_rank(tp_size), shape.head_dim)
        attention = [
            point
            for point in profile.attention
            if point.gpu == gpu and (point.heads, point.kv_heads, point.head_dim) == heads
        ]
        sums = [
            (point.message_bytes, point.ns)
            for point in profile.all_reduce
            if (point.gpu, point.source, point.ranks) == (gpu, GRAPH_ALL_REDUCE, tp_size)
        ]
        name = shape.name if model is None else model
        return cls(
            model=shape.name,
            layers=shape.decoder_layers,
            linear=_linear(profile, gpu, name, tp_size),
            prefill=_grid(attention, "prefill", _prefill_of(roofline)),
            decode=_grid(attention, "decode", _decode_of(roofline)),
            all_reduce=TimeCurve.of(sums) if sums else None,
            token_bytes=_BF16_BYTES * shape.hidden,
            iteration_ns=ENGINES["graph"].iteration_ns,
            beyond=roofline,
        )

    @classmethod
    def measured(cls, profile: OpProfile) -> TableLatency:
        """The one model and the one accelerator that the profile is of; nothing is known beyond.

        Raises ValueError when it is of several, or does not tell the model's layers.
        """
        names = sorted({(point.gpu, point.model, point.tp_size) for point in profile.linear})
        if len(names) != 1 or profile.layers is None:
            raise ValueError(
                f"a profile of one machine and one model has one (gpu, model, tp) and its layers;"
                f" this one has {len(names)}"
            )
        extend = [(p.context_tokens, p.ns) for p in profile.attention if p.kind == "extend"]
        heads = [(p.tokens, p.ops_ns[HEAD]) for p in profile.linear if HEAD in p.ops_ns]
        return cls(
            model=names[0][1],
            layers=profile.layers,
            linear=_linear(profile, *names[0]),
            prefill=_grid(profile.attention, "prefill", None),
            extend=TimeCurve.of(extend) if extend else None,
            decode=_grid(profile.attention, "decode", None),
            head=TimeCurve.of(heads) if heads else None,
        )

    # -- whole Runs -------------------------------------------------------------------------

    def run_ns(self, work: RunWork) -> int:
        """Time of one Run over all layers."""
        tokens = work.token_count
        layer_ns = self.linear_layer_ns(tokens) + self.all_reduce_layer_ns(tokens)
        if work.prefills:
            layer_ns += self.prefill_layer_ns(work.prefills)
        rest_ns = self._rest_ns(work.sampled, len(work.prefills) + work.decodes)
        return self._total_ns(layer_ns, work.decodes, work.decode_context_tokens, rest_ns)

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        """Times of `steps` Runs of the same decodes, whose context grows."""
        layer_ns = self.linear_layer_ns(decodes) + self.all_reduce_layer_ns(decodes)
        rest_ns = self._rest_ns(decodes, decodes)
        return [
            self._total_ns(layer_ns, decodes, context_tokens + decodes * step, rest_ns)
            for step in range(steps)
        ]

    # -- parts of it: nanoseconds of one layer ------------------------------------------------

    def linear_layer_ns(self, tokens: int) -> float:
        """Everything but attention and all-reduces."""
        roofline = self.beyond
        return self.linear.value(tokens, None if roofline is None else _linear_of(roofline))

    def all_reduce_layer_ns(self, tokens: int) -> float:
        """Both all-reduces of a layer."""
        roofline = self.beyond
        if self.all_reduce is None:
            return 0.0 if roofline is None else roofline.all_reduce_layer_ns(tokens)
        return _ALL_REDUCES * self.all_reduce.value(tokens * self.token_bytes)

    def prefill_layer_ns(self, prefills: Iterable[tuple[int, int]]) -> float:
        """Attention of chunks of prompts: (new tokens, tokens before them) each.

        A chunk counts as a prompt with as many pairs of positions, and `extend` comes on top when
        it is none; all chunks count as equally long.
        """
        chunks = list(prefills)
        if self.prefill is None:
            return 0.0 if self.beyond is None else self.beyond.prefill_layer_ns(chunks)
        squares = sum(new * (new + 2 * before) for new, before in chunks)
        size = math.sqrt(squares / len(chunks))
        beyond = None if self.beyond is None else _prefill_of(self.beyond)
        attending_ns = self.prefill.value(len(chunks), size, beyond)
        if self.extend is not None:
            later = (math.sqrt(new * (new + 2 * before)) for new, before in chunks if before)
            attending_ns += math.fsum(map(self.extend.value, later))
        return attending_ns

    def decode_layer_ns(self, decodes: int, context_tokens: int) -> float:
        """Attention of decodes that attend to so many tokens in sum; contexts of different
        lengths count as equally long."""
        roofline = self.beyond
        if self.decode is None:
            return 0.0 if roofline is None else roofline.decode_layer_ns(decodes, context_tokens)
        beyond = None if roofline is None else _decode_of(roofline)
        return self.decode.value(decodes, context_tokens / decodes, beyond)

    # -- helpers, in the order used ---------------------------------------------------------

    def _rest_ns(self, sampled: int, sequences: int) -> float:
        rest_ns = self.iteration_ns + self.sequence_ns * sequences
        if not sampled:
            return float(rest_ns)
        if self.head is not None:
            return rest_ns + self.head.value(sampled)
        return rest_ns + (0.0 if self.beyond is None else self.beyond.head_ns(sampled))

    def _total_ns(self, layer_ns: float, decodes: int, context_tokens: int, rest_ns: float) -> int:
        if decodes:
            layer_ns += self.decode_layer_ns(decodes, context_tokens)
        return int(self.layers * layer_ns + rest_ns + 0.5)


def _linear(profile: OpProfile, gpu: str, model: str, tp_size: int) -> TimeCurve:
    points = [
        (point.tokens, point.layer_ns)
        for point in profile.linear
        if (point.gpu, point.model, point.tp_size) == (gpu, model, tp_size)
    ]
    times = [(tokens, ns) for tokens, ns in points if ns is not None]
    if not times:
        raise ValueError(f"no linear layers of {model} with tp {tp_size} on {gpu} were measured")
    return TimeCurve.of(times)


def _grid(
    points: Iterable[AttentionPoint],
    kind: str,
    beyond: Callable[[float, float], float] | None,
) -> TimeGrid | None:
    times = [(p.batch, p.context_tokens, float(p.ns)) for p in points if p.kind == kind]
    return TimeGrid.of(times, beyond) if times else None


def _linear_of(roofline: RooflineLatency) -> Callable[[float], float]:
    return lambda tokens: roofline.linear_layer_ns(tokens)


def _prefill_of(roofline: RooflineLatency) -> Callable[[float, float], float]:
    """By sequences and the length of each: may be fractions."""
    fixed_ns = roofline.prefill_layer_ns(())
    return lambda batch, size: (
        fixed_ns + batch * (roofline.prefill_layer_ns(((size, 0.0),)) - fixed_ns)
    )


def _decode_of(roofline: RooflineLatency) -> Callable[[float, float], float]:
    return lambda batch, size: roofline.decode_layer_ns(batch, batch * size)
