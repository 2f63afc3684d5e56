"""The table: how long a transformer takes, from operations that were measured one by one.

Composed as the roofline is: linear layers by the Run's tokens, attention by batch and context, then
the head. Logs are never drawn out beyond the last point, which overestimates (+18 % was seen).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from livescale.clusters.profiles import HEAD, OpProfile
from livescale.latency.curves import TimeCurve, TimeGrid
from livescale.latency.work import RunWork
from livescale.values.types import Value


class TableLatency(Value, frozen=True, tag="table"):
    """One model on one kind of accelerator, by measurement: curves in nanoseconds.

    `linear` is one layer without attention by new tokens; `prefill` and `decode` one layer's
    attention by sequences and their context; `extend` what a chunk with tokens before it takes
    beyond a prompt with as many pairs of positions; `head` by sampled sequences. What is None was
    not measured, and takes no time.
    """

    model: str
    layers: int
    linear: TimeCurve
    prefill: TimeGrid | None = None
    extend: TimeCurve | None = None
    decode: TimeGrid | None = None
    head: TimeCurve | None = None

    @classmethod
    def measured(cls, profile: OpProfile) -> TableLatency:
        """The one model and the one accelerator that the profile is of.

        Raises ValueError when it is of several, does not count the model's layers, or has no linear
        ones.
        """
        names = sorted({(point.gpu, point.model, point.tp_size) for point in profile.linear})
        if len(names) != 1 or profile.layers is None:
            raise ValueError(
                f"a profile of one machine and one model has one (gpu, model, tp) and its layers;"
                f" this one has {len(names)}"
            )
        gpu, model, tp_size = names[0]
        linear = [(p.tokens, p.layer_ns) for p in profile.linear if p.layer_ns is not None]
        if not linear:
            what = f"{model} with tp {tp_size} on {gpu}"
            raise ValueError(f"no linear layers of {what} were measured")
        extend = [(p.context_tokens, p.ns) for p in profile.attention if p.kind == "extend"]
        heads = [(p.tokens, p.ops_ns[HEAD]) for p in profile.linear if HEAD in p.ops_ns]
        return cls(
            model=model,
            layers=profile.layers,
            linear=TimeCurve.of(linear),
            prefill=_grid(profile, "prefill"),
            extend=TimeCurve.of(extend) if extend else None,
            decode=_grid(profile, "decode"),
            head=TimeCurve.of(heads) if heads else None,
        )

    # -- whole Runs -------------------------------------------------------------------------

    def run_ns(self, work: RunWork) -> int:
        layer_ns = self.linear.value(work.token_count)
        if work.prefills:
            layer_ns += self.prefill_layer_ns(work.prefills)
        return self._total_ns(layer_ns, work.decodes, work.decode_context_tokens, work.sampled)

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        layer_ns = self.linear.value(decodes)
        return [
            self._total_ns(layer_ns, decodes, context_tokens + decodes * step, decodes)
            for step in range(steps)
        ]

    # -- parts of it: nanoseconds of one layer ------------------------------------------------

    def prefill_layer_ns(self, prefills: Iterable[tuple[int, int]]) -> float:
        """Attention of chunks of prompts: (new tokens, tokens before them) each.

        A chunk counts as a prompt with as many pairs of positions, and `extend` comes on top when
        it is none; all chunks count as equally long.
        """
        chunks = list(prefills)
        if self.prefill is None:
            return 0.0
        squares = sum(new * (new + 2 * before) for new, before in chunks)
        attending_ns = self.prefill.value(len(chunks), math.sqrt(squares / len(chunks)))
        if self.extend is not None:
            later = (math.sqrt(new * (new + 2 * before)) for new, before in chunks if before)
            attending_ns += math.fsum(map(self.extend.value, later))
        return attending_ns

    def decode_layer_ns(self, decodes: int, context_tokens: int) -> float:
        """Attention of decodes that attend to so many tokens in sum; contexts of different
        lengths count as equally long."""
        return 0.0 if self.decode is None else self.decode.value(decodes, context_tokens / decodes)

    # -- helpers, in the order used ---------------------------------------------------------

    def _total_ns(self, layer_ns: float, decodes: int, context_tokens: int, sampled: int) -> int:
        if decodes:
            layer_ns += self.decode_layer_ns(decodes, context_tokens)
        head_ns = self.head.value(sampled) if sampled and self.head is not None else 0.0
        return int(self.layers * layer_ns + head_ns + 0.5)


def _grid(profile: OpProfile, kind: str) -> TimeGrid | None:
    points = [p for p in profile.attention if p.kind == kind]
    times = [(p.batch, p.context_tokens, float(p.ns)) for p in points]
    return TimeGrid.of(times) if times else None
