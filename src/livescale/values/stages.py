"""Stages of a model: runs of its layers that are loaded, and scale, by themselves (QUART §4).

To all that loads, keeps and counts bytes a stage is a model, with layers and KV of its own. What
joins them is that requests go through one instance of each (`control/stages`). Arithmetic only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import msgspec

from livescale.values.types import LayerSpan, ModelSpec, StageOf


class StageError(ValueError):
    """The model cannot have these stages; the message says why."""


def stage_name(model: str, number: int) -> str:
    """What a stage is called where it stands among models."""
    return f"{model}/{number}"


def even_stages(
    spec: ModelSpec, count: int, layer_ns: Sequence[int] | None = None
) -> tuple[LayerSpan, ...]:
    """`count` spans, the slowest of which is as fast as can be where layers take these times
    (None: decoder layers the same, the embedding and the head nothing; some stages, the first one
    among them, have one layer more where these do not divide). Raises StageError where there are
    fewer decoder layers, or not as many times as layers."""
    layers = spec.layers - 2
    if not 1 <= count <= layers:
        raise StageError(
            f"model {spec.name} has {layers} decoder layers: it cannot have {count} stages"
        )
    if layer_ns is None:
        ends = [-(-layers * number // count) for number in range(1, count)]
        return check_stages(spec, _between([0, *(end + 1 for end in ends), spec.layers]))
    if len(layer_ns) != spec.layers:
        raise StageError(
            f"model {spec.name} has {spec.layers} layers, the profile is of {len(layer_ns)}"
        )
    times = list(layer_ns[1:-1])
    times[0] += layer_ns[0]
    times[-1] += layer_ns[-1]
    ends = _even_ends(times, count)
    return check_stages(spec, _between([0, *(end + 1 for end in ends[:-1]), spec.layers]))


def check_stages(spec: ModelSpec, spans: Sequence[LayerSpan]) -> tuple[LayerSpan, ...]:
    """The spans, if a model can have them as stages. Raises StageError."""
    name, layers = spec.name, spec.layers
    if not spans:
        raise StageError(f"model {name}: no stages are listed")
    expected = 0
    for span in spans:
        if span.start != expected:
            raise StageError(f"model {name}: stage {span} does not begin with layer {expected}")
        expected = span.stop
    if expected != layers:
        raise StageError(f"model {name} has {layers} layers, its last stage is {spans[-1]}")
    for span in spans:
        if not span.decoder_layers(layers):
            raise StageError(f"model {name}: stage {span} has no decoder layer")
    if spec.is_tied and len(spans) > 1:
        raise StageError(
            f"model {name} cannot have stages: its head computes with the embedding's matrix,"
            " which is in the first one"
        )
    if spec.tp_size > 1:
        raise StageError(f"model {name}: stages and tensor parallelism do not go together")
    return tuple(spans)


def stages_of(name: str, layers: int, spans: Sequence[LayerSpan]) -> list[tuple[StageOf, int]]:
    """Each stage of a model of so many layers, with how many layers it has of its own."""
    found = []
    for number, span in enumerate(spans):
        first = max(span.start - 1, 0)
        last = min(span.stop, layers - 1)
        found.append((StageOf(name, number, len(spans), first), last + 1 - first))
    return found


def stage_specs(spec: ModelSpec, spans: Sequence[LayerSpan]) -> tuple[ModelSpec, ...]:
    """What the control plane knows of each stage. Raises StageError."""
    check_stages(spec, spans)
    kv_layer_bytes = spec.kv_bytes_per_token // (spec.layers - 2)
    found = []
    for (stage, layers), span in zip(stages_of(spec.name, spec.layers, spans), spans, strict=True):
        numbers = range(stage.first_layer, stage.first_layer + layers)
        found.append(
            msgspec.structs.replace(
                spec,
                name=stage_name(spec.name, stage.number),
                layer_bytes=tuple(spec.layer_bytes[n] if n in span else 0 for n in numbers),
                kv_bytes_per_token=kv_layer_bytes * (layers - 2),
                stage=stage,
            )
        )
    return tuple(found)


def takes_rows(stage: StageOf | None, span: LayerSpan) -> bool:
    """A Run over these layers begins with hidden rows, not with token ids."""
    return span.start > 0 or (stage is not None and not stage.is_first)


def gives_rows(stage: StageOf | None, span: LayerSpan, layers: int) -> bool:
    """A Run over these of all `layers` ends with hidden rows, not with tokens."""
    return span.stop < layers or (stage is not None and not stage.is_last)


def _even_ends(times: Sequence[int], count: int) -> list[int]:
    """How many of the times lie before the end of each of `count` groups: the largest sum is the
    least, then the sum of squares, then earlier groups are larger."""
    largest, _ = _cheapest(times, count, max)
    _, ends = _cheapest(
        times, count, lambda cost, more: cost + more**2 if more <= largest else math.inf
    )
    return [-end for end in ends]


def _cheapest(
    times: Sequence[int], count: int, add: Callable[[float, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Of all ways to form so many groups the cheapest one's cost, where `add` gives what it costs
    with one more group of that sum; and the ends of its groups, negated: of ways as cheap the one
    whose earlier groups are larger is the least."""
    before = list(itertools.accumulate(times, initial=0))
    found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for number in range(1, count + 1):
        found = {
            end: min(
                (add(cost, before[end] - before[start]), (*ends, -end))
                for start, (cost, ends) in found.items()
                if start < end
            )
            for end in range(number, len(times) + 1)
        }
    return found[len(times)]


def _between(edges: Sequence[int]) -> tuple[LayerSpan, ...]:
    return tuple(map(LayerSpan, edges[:-1], edges[1:]))
