"""What a prompt costs where layers are missing: figures that the router compares routes by."""

from __future__ import annotations

from livescale.control.instance import Instance
from livescale.control.model_state import ModelState
from livescale.plans import pair_rate

_NS_PER_S = 1_000_000_000
UNKNOWN_LAG_TOKENS = 1 << 40
"""More than anybody has: what is loading for an unknown time comes after all that serve."""


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
    """Prompt tokens that an instance computes while what the target misses is on its way: as fast
    as what it has, or as was predicted while it has nothing. `is_timed`: counted from its last
    layer, and at the rate that instances really have."""
    sizes = state.spec.layer_bytes
    there, missing = sum(sizes[: target.watermark]), sum(sizes[target.watermark :])
    first_ns, last_ns = target.first_byte_ns, target.layer_ns
    # What was kept from an earlier life says nothing of how fast the others come.
    came = sum(sizes[target.kept_layers : target.watermark]) if is_timed else 0
    if came and first_ns is not None and last_ns is not None:
        left_ns = (last_ns - first_ns) * missing // came - (now_ns - last_ns)
    elif there and first_ns is not None and not is_timed:
        left_ns = (now_ns - first_ns) * missing // there
    elif target.predicted_ns is not None:
        left_ns = target.predicted_ns * missing // (there + missing)
    else:
        return UNKNOWN_LAG_TOKENS
    rate = tokens_per_s(state) if is_timed else state.prefill_tokens_per_s
    if rate is None:
        return UNKNOWN_LAG_TOKENS
    return max(left_ns * rate // _NS_PER_S, 1)
