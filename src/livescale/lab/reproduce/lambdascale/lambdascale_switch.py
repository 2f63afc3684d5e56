"""λScale's claim about the end of a pipeline: what its requests' KV costs, moved or computed anew.

Both take place at all members at once. Each gets an even share of the requests; of every token it
has KV of its own layers, and fetches that of the others over its NIC, or computes all layers.
"""

from __future__ import annotations

import itertools

from livescale.lab.reproduce.base.claim import Conditions, Curve, Measured, Picture, claim
from livescale.lab.reproduce.base.models import prefill_ms
from livescale.latency.shapes import PRESETS
from livescale.values.units import GBIT_BYTES

_MODELS = {"7b": ("llama-2-7b", 1), "13b": ("llama-2-13b", 1), "70b": ("llama-2-70b", 4)}
"""Preset and ranks, as on the paper's testbeds. Four ranks of a node share its one NIC."""
_MEMBERS = (2, 4)
_KIND = "h800"
_TOKENS = 2000
_NIC_GBIT = 400
_RATES_GBIT = (5, 10, 20, 40, 80, 160, 400)


@claim(
    id="L21",
    judges="arithmetic",
    setup="KV of 2,000 tokens on H800, two to four members: moved over 400 Gbit/s a node, or"
    " computed anew; 7B, 13B, 70B TP4",
    paper="computing anew costs less than all-to-all moves of KV",
    tolerance="direction, each model",
    ours="moving is {gain_7b_4:.1f} to {gain_7b_2:.1f} × as fast (7B), {gain_13b_4:.1f} to"
    " {gain_13b_2:.1f} (13B), {gain_70b_4:.0f} to {gain_70b_2:.0f} (70B). Equal at {even_7b_2:.0f}"
    " to {even_7b_4:.0f} Gbit/s (7B), {even_13b_2:.0f} to {even_13b_4:.0f} (13B), {even_70b_2:.0f}"
    " to {even_70b_4:.0f} (70B)",
    is_within=lambda f: all(
        f[f"gain_{model}_{count}"] < 1 for model, count in itertools.product(_MODELS, _MEMBERS)
    ),
    note="the statement holds on links that are slower than where both are equal; the paper's have"
    " 400 Gbit/s. Set-up, the copies to and from contiguous memory and an engine's own overheads"
    " are in neither time",
)
def moved_or_computed_anew(conditions: Conditions) -> Measured:
    """λScale §4.4, mode switch. Per model and number of members: `gain`, the time to compute anew
    over the time to move; `even_`, the rate (Gbit/s) at which both take as long."""
    figures: dict[str, float] = {}
    for model, count in itertools.product(_MODELS, _MEMBERS):
        name, anew_s = f"{model}_{count}", _anew_s(model)
        figures[f"gain_{name}"] = anew_s / _move_s(model, count, _NIC_GBIT)
        figures[f"even_{name}"] = _move_s(model, count, 1) / anew_s
    curves: list[Curve] = []
    for model in _MODELS:
        moved = tuple((rate, 1e3 * _move_s(model, 2, rate)) for rate in _RATES_GBIT)
        anew = tuple((rate, 1e3 * _anew_s(model)) for rate in _RATES_GBIT)
        curves += [Curve(f"{model}, moved (2 members)", moved)]
        curves += [Curve(f"{model}, computed anew", anew)]
    title = f"KV of a request of {_TOKENS:,} tokens at the end of a team"
    picture = Picture(title, "link (Gbit/s)", "time (ms)", tuple(curves), is_log_x=True)
    return Measured(figures, picture)


# -- helpers, in the order used -------------------------------------------------------------------


def _anew_s(model: str) -> float:
    preset, tp_size = _MODELS[model]
    return prefill_ms(_KIND, preset, _TOKENS, tp_size) / 1e3


def _move_s(model: str, members: int, gbit_per_s: float) -> float:
    """All but the member's own part of the layers."""
    preset, _ = _MODELS[model]
    kv_bytes = PRESETS[preset].spec().kv_bytes_per_token * _TOKENS * (members - 1) / members
    return kv_bytes / (gbit_per_s * GBIT_BYTES)
