"""What a prompt costs where layers are missing: figures that the router compares routes by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from livescale.control.state.instance import Instance
from livescale.control.state.model_state import ModelState
from livescale.messages.scale_plan import pair_rate
from livescale.values.units import NS_PER_S

UNKNOWN_LAG_TOKENS = 1 << 40
"""More than any instance has: what is loading for an unknown time comes after all that serve."""


def tokens_per_s(state: ModelState) -> int | None:
    """Prompt tokens that an instance of the model computes: as instances do, else as was measured
    or configured before. None: not known."""
    return state.service.tokens_per_s or state.prefill_tokens_per_s


def decoder_layers(target: Instance) -> tuple[int, int]:
    """How many decoder layers a loading instance has, and of how many."""
    layers = max(target.part.span.stop - 2, 1)
    return min(max(target.watermark - 1, 0), layers), layers


def pair_permille(target: Instance) -> int:
    """What a prompt costs a pair now, of what it costs one instance."""
    rate, cost = pair_rate(*decoder_layers(target))
    return cost * 1000 // rate


def lag_tokens(now_ns: int, state: ModelState, target: Instance, *, is_timed: bool) -> int:
    """As `tokens_while_loading`, of a loading instance. `is_timed`: counted from its last layer,
    and at the rate that instances really have."""
    arrival = LayersArriving(
        watermark=target.watermark,
        kept_layers=target.kept_layers if is_timed else 0,
        first_byte_ns=target.first_byte_ns,
        layer_ns=target.layer_ns if is_timed else None,
        predicted_ns=target.predicted_ns,
    )
    rate = tokens_per_s(state) if is_timed else state.prefill_tokens_per_s
    return tokens_while_loading(now_ns, state.spec.layer_bytes, arrival, rate)


class LayersArriving(NamedTuple):
    """How far a load is: the target has `watermark` of the model's layers, `kept_layers` of them
    from an earlier life, which say nothing of how fast others come, and the last one since
    `layer_ns` (None: the time that is left counts from now). The first byte came at
    `first_byte_ns`; the whole load was predicted to take `predicted_ns`."""

    watermark: int
    kept_layers: int
    first_byte_ns: int | None
    layer_ns: int | None
    predicted_ns: int | None


def tokens_while_loading(
    now_ns: int, layer_bytes: Sequence[int], load: LayersArriving, rate: int | None
) -> int:
    """Prompt tokens that an instance computes, `rate` per second, while what a target misses is on
    its way: that comes as fast as what came since the first byte, or as was predicted for the whole
    load while there is none."""
    there, missing = sum(layer_bytes[: load.watermark]), sum(layer_bytes[load.watermark :])
    came = there - sum(layer_bytes[: load.kept_layers])
    if came and load.first_byte_ns is not None:
        last_ns = now_ns if load.layer_ns is None else load.layer_ns
        left_ns = (last_ns - load.first_byte_ns) * missing // came - (now_ns - last_ns)
    elif load.predicted_ns is not None:
        left_ns = load.predicted_ns * missing // (there + missing)
    else:
        return UNKNOWN_LAG_TOKENS
    if rate is None:
        return UNKNOWN_LAG_TOKENS
    return max(left_ns * rate // NS_PER_S, 1)
