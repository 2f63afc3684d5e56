"""BlitzScale's claims about two machines that share layers: exact, in virtual time.

Units are what one layer of one batch takes; a layer comes every `_PACE` of them.
"""

from __future__ import annotations

from livescale.batching.contract.live_order import LIVE_ORDERS
from livescale.lab.reproduce.base.claim import Conditions, Curve, Measured, Picture, claim, near
from livescale.sim.pair.optimum import best_split, finish_times
from livescale.sim.pair.player import LivePlay, loaded_every, play

_LAYERS, _PACE, _REQUESTS = 7, 6, 7
_ZIGZAG = LIVE_ORDERS["zigzag"]
_LAYERS_8B, _WAITING = 32, 5
_LONG = 400
"""Batches of a queue that is long enough for a steady state."""


@claim(
    id="B1",
    judges="arithmetic",
    setup="7 layers, a long queue, k of them on the new instance",
    paper="throughput 1/7 → 1/6 with one layer, twice with half of them",
    tolerance="exact (to 0.1 %)",
    ours="{with_none:.4f} → {with_one:.4f}; × {ratio_below_half:.2f} with three layers,"
    " × {ratio_at_half:.2f} with four",
    is_within=near(1e-3, with_none=1 / 7, with_one=1 / 6, ratio_at_half=2, ratio_max=2),
)
def throughput_by_layers(conditions: Conditions) -> Measured:
    """BlitzScale §4, §5.2. A long queue, and a target that never gets more than its first k layers;
    the rate, in requests per unit, in the middle half of the ends."""
    rates = [_steady_rate(loaded) for loaded in range(_LAYERS + 1)]
    half = -(-_LAYERS // 2)
    figures: dict[str, float] = {
        "with_none": rates[0],
        "with_one": rates[1],
        "ratio_below_half": rates[half - 1] / rates[0],
        "ratio_at_half": rates[half] / rates[0],
        "ratio_max": max(rates) / rates[0],
    }
    points = tuple((float(loaded), rate / rates[0]) for loaded, rate in enumerate(rates))
    curve = Curve("ZigZag", points)
    title = "Throughput of a live pair, in instances"
    return Measured(figures, Picture(title, "layers loaded, of 7", "instances", (curve,)))


@claim(
    id="B2",
    judges="arithmetic",
    setup="Figure 15 (b): 7 layers, 6 units to load one, 7 requests wait",
    paper="the first two end by 12, the third at 17",
    tolerance="exact, and the mean of the optimum",
    ours="{first:.0f} and {second:.0f}, {third:.0f}; all ends together {apart_from_optimum:.0f}"
    " from the optimum",
    is_within=lambda f: (
        (f["second"], f["third"], f["apart_from_optimum"]) == (12, 17, 0) and f["first"] <= 12
    ),
    note="by the paper's integer program, too, once its third constraint is corrected: as"
    " printed it is off by one layer, and has no solution for three to seven requests",
)
def zigzag_example(conditions: Conditions) -> Measured:
    """BlitzScale §5.2, Figure 15 (b). Layer k is there after 6 (k - 1) units."""
    played = _figure_15("zigzag")
    best = best_split(_LAYERS, [1] * _REQUESTS, loaded_every(_PACE, _LAYERS))
    first, second, third = played.finished_ns[:3]
    figures: dict[str, float] = {
        "first": first,
        "second": second,
        "third": third,
        "apart_from_optimum": sum(played.finished_ns) - sum(best.finished_ns),
    }
    return Measured(figures, _ends_picture())


@claim(
    id="B3",
    judges="arithmetic",
    setup="Figure 15 (a): the same with best effort, layers on the new instance",
    paper="(1, 6) for requests 1 to 6, (2, 5) for the seventh",
    tolerance="exact",
    ours="{most:.0f} for requests 1 to 6 ({least:.0f} at least), {layers_7:.0f} for the last",
    is_within=near(0, least=1, most=1, layers_7=2),
)
def best_effort_example(conditions: Conditions) -> Measured:
    """BlitzScale §5.2, Figure 15 (a)."""
    played = _figure_15("best-effort")
    counts = played.target_layers
    figures = {f"layers_{number}": count for number, count in enumerate(counts, 1)}
    figures["least"], figures["most"] = min(counts[:-1]), max(counts[:-1])
    return Measured({name: float(value) for name, value in figures.items()})


@claim(
    id="B4",
    judges="arithmetic",
    corrected="counted from the start of loading: 42 → 29, not 32 → 22",
    setup="Figure 15: latency of the seventh request",
    paper="32 → 22 from best effort to ZigZag",
    tolerance="as corrected: 42 → 29 from the start of loading; shorter by at least 10",
    ours="{best_effort:.0f} → {zigzag:.0f}, {gain:.0f} shorter",
    is_within=lambda f: (f["best_effort"], f["zigzag"]) == (42, 29) and f["gain"] >= 10,
    note="22 cannot be when counted from the start of loading: 49 layers on two machines take"
    " 24.5 units, and the least of all splits is 29. The text's own split ends at"
    " 32",
)
def last_request(conditions: Conditions) -> Measured:
    """BlitzScale §5.2, Figure 15, counted from the start of loading."""
    best_effort, zigzag = (_figure_15(name).finished_ns[-1] for name in ("best-effort", "zigzag"))
    worked = finish_times((1, *(2,) * 4, 4, 5), _LAYERS, [1] * 7, loaded_every(_PACE, _LAYERS))
    figures = {
        "best_effort": best_effort,
        "zigzag": zigzag,
        "gain": best_effort - zigzag,
        "by_the_text": worked[-1],
    }
    return Measured({name: float(value) for name, value in figures.items()})


@claim(
    id="B34",
    judges="arithmetic",
    corrected="no program is solved; the order that needs none is held against its optimum",
    setup="Llama3-8B's 32 layers, 5 requests wait, 3 to 12 units to load a layer",
    paper="the integer program is solved within 40 ms",
    tolerance="no program is needed: its mean latency is missed by at most 0.2 %",
    ours="the order without a program is {apart_percent_max:.2f} % from the optimum at most",
    is_within=lambda f: f["apart_percent_max"] <= 0.2,
    note="choosing the next layer takes microseconds; the program takes HiGHS 10 s for 32"
    " layers and 12 requests",
)
def without_a_program(conditions: Conditions) -> Measured:
    """BlitzScale §5.2. The order of Figure 16 chooses from what each batch has done; against the
    exact optimum."""
    apart = []
    for pace in (3, 4, 6, 8, 12):
        loaded = loaded_every(pace, _LAYERS_8B)
        played = play(_ZIGZAG, _LAYERS_8B, [1] * _WAITING, loaded)
        best = best_split(_LAYERS_8B, [1] * _WAITING, loaded)
        apart.append(100 * (played.mean_ns / best.mean_ns - 1))
    return Measured({"apart_percent_max": max(apart), "apart_percent_min": min(apart)})


@claim(
    id="B42",
    judges="arithmetic",
    setup="Figure 9 (c): 7 layers, 6 units to load one, the first result of a new instance",
    paper="after 49 units; after 43 if layers run as they arrive",
    tolerance="exact",
    ours="{stop:.0f}; {overlap:.0f}",
    is_within=near(0, stop=49, overlap=43),
)
def first_result_alone(conditions: Conditions) -> Measured:
    """BlitzScale §4, Figure 9 (c), counted from the start of loading."""
    loaded = [_PACE * (number + 1) for number in range(_LAYERS)]
    ends = {
        name: play(LIVE_ORDERS[name], _LAYERS, [1], loaded, has_source=False).last_ns
        for name in ("overlap", "stop-the-world")
    }
    return Measured({"overlap": ends["overlap"], "stop": ends["stop-the-world"]})


# -- helpers --------------------------------------------------------------------------------------


def _figure_15(order: str) -> LivePlay:
    loaded = loaded_every(_PACE, _LAYERS)
    return play(LIVE_ORDERS[order], _LAYERS, [1] * _REQUESTS, loaded)


def _steady_rate(loaded: int) -> float:
    """Batches per unit with so many layers on the target for good."""
    ends = sorted(play(_ZIGZAG, _LAYERS, [1] * _LONG, [0] * loaded).finished_ns)
    first, last = _LONG // 4, _LONG * 3 // 4
    return (last - first) / (ends[last] - ends[first])


def _ends_picture() -> Picture:
    curves = tuple(
        Curve(name, tuple((float(n), float(end)) for n, end in enumerate(ends, 1)))
        for name, ends in (
            (name, _figure_15(name).finished_ns)
            for name in ("zigzag", "best-effort", "overlap", "stop-the-world")
        )
    )
    title = "Seven requests, seven layers, six units to load one"
    return Picture(title, "request", "first token at", curves)
