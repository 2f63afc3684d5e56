"""Two machines in a live order: the paper's example, what holds for every order, and the protocol's
own price."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.batching.contract.live_order import LIVE_ORDERS, LiveOrder
from livescale.batching.live.live_batch import LiveLimits
from livescale.sim.pair.pair_world import PairLoad, PairRun, PairWorld
from livescale.sim.pair.player import LivePlay, loaded_every, play
from livescale.values.types import LayerSpan

UNIT_NS = 1_000_000
ZIGZAG, STOP = LIVE_ORDERS["zigzag"], LIVE_ORDERS["stop-the-world"]
FIGURE_15 = {
    "zigzag": (7, 12, 17, 21, 24, 27, 29),
    "best-effort": (7, 13, 19, 25, 31, 37, 42),
}


def figure_15(order: str) -> LivePlay:
    return play(LIVE_ORDERS[order], 7, [1] * 7, loaded_every(6, 7))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Layers, times of a layer of each batch, load times."""
    layers = draw(st.integers(2, 9))
    layer_ns = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    gaps = draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    return layers, layer_ns, [sum(gaps[: m + 1]) for m in range(layers)]


@pytest.mark.parametrize("order", FIGURE_15)
def test_the_papers_example(order: str) -> None:
    assert figure_15(order).finished_ns == FIGURE_15[order]


def test_best_effort_shares_as_in_the_figure() -> None:
    """Figure 15 (a): (1, 6) for six requests, (2, 5) for the seventh."""
    assert figure_15("best-effort").target_layers == (1, 1, 1, 1, 1, 1, 2)


def test_a_new_instance_alone_gives_its_first_result_six_units_sooner() -> None:
    """Figure 9 (c): layer k is there 6 k after the start of loading."""
    loaded = [6 * k for k in range(1, 8)]
    alone = {
        name: play(LIVE_ORDERS[name], 7, [1], loaded, has_source=False).last_ns
        for name in ("overlap", "stop-the-world")
    }
    assert alone == {"overlap": 43, "stop-the-world": 49}


@pytest.mark.parametrize(("pace", "last", "alone"), [(2, 68, 80), (6, 71, 112), (12, 93, 128)])
def test_the_last_of_eight_batches(pace: int, last: int, alone: int) -> None:
    """16 layers: 0.85, 0.634 and 0.727 of stop-the-world."""
    loaded = loaded_every(pace, 16)
    assert play(ZIGZAG, 16, [1] * 8, loaded).last_ns == last
    assert play(STOP, 16, [1] * 8, loaded).last_ns == alone


@pytest.mark.parametrize(("pace", "added"), [(2, 0.548), (6, 0.892), (12, 0.892)])
def test_first_tokens_that_a_pair_adds_until_its_target_is_full(pace: int, added: float) -> None:
    """Of 32 layers, with batches for longer than the load, in instance-loads: what one instance
    computes meanwhile. The source alone begins as many as its time allows, in parts."""
    loaded = loaded_every(pace, 32)
    ends = play(ZIGZAG, 32, [1] * 64, loaded).finished_ns
    alone = loaded[-1] / 32
    firsts = sum(end <= loaded[-1] for end in ends)
    assert round((firsts - alone) / alone, 3) == added


@given(cases(), st.sampled_from(list(LIVE_ORDERS.values())))
def test_every_layer_runs_once_and_not_before_it_is_there(
    case: tuple[int, list[int], list[int]], order: LiveOrder
) -> None:
    layers, layer_ns, loaded_ns = case
    played = play(order, layers, layer_ns, loaded_ns)
    free_ns = {True: 0, False: 0}
    done, ended = [0] * len(layer_ns), [0] * len(layer_ns)
    for stretch in played.stretches:
        assert stretch.start_ns >= max(free_ns[stretch.on_target], ended[stretch.batch])
        assert stretch.stop_ns - stretch.start_ns == stretch.layers * layer_ns[stretch.batch]
        assert stretch.first_layer == done[stretch.batch]
        done[stretch.batch] += stretch.layers
        free_ns[stretch.on_target] = ended[stretch.batch] = stretch.stop_ns
        if stretch.on_target:
            assert stretch.start_ns >= loaded_ns[done[stretch.batch] - 1]
    assert done == [layers] * len(layer_ns)
    assert tuple(ended) == played.finished_ns
    assert sum(s.stop_ns - s.start_ns for s in played.stretches) == layers * sum(layer_ns)


@given(cases())
def test_help_does_no_harm(case: tuple[int, list[int], list[int]]) -> None:
    """Against the source alone: no batch ends later than when the source runs all in order."""
    layers, layer_ns, loaded_ns = case
    alone = [layers * sum(layer_ns[: i + 1]) for i in range(len(layer_ns))]
    ends = play(ZIGZAG, layers, layer_ns, loaded_ns).finished_ns
    # The source may have to wait for a layer that the target is in.
    waits = len(layer_ns) * max(layer_ns)
    assert all(end <= bound + waits for end, bound in zip(ends, alone, strict=True))


def test_layers_that_never_come_are_said() -> None:
    with pytest.raises(ValueError, match="layers that never come"):
        play(LIVE_ORDERS["overlap"], 3, [1], [0, 1], has_source=False)
    with pytest.raises(ValueError, match="rising times"):
        play(ZIGZAG, 3, [1], [2, 1, 3])


# -- the production protocol ----------------------------------------------------------------------


def pair(order: str, layers: int, pace: int, count: int, **more: object) -> PairRun:
    loaded = [UNIT_NS * at for at in loaded_every(pace, layers)]
    given_: dict[str, object] = {
        "message_ns": 0,
        "bytes_per_s": None,
        "row_bytes": 0,
        "kv_layer_bytes": 0,
        "tokens": (512,) * count,
        **more,
    }
    arrived = (0, *loaded, loaded[-1])
    load = PairLoad(order, layers, (UNIT_NS,) * count, arrived, **given_)  # type: ignore[arg-type]
    return PairWorld(load).play()


@pytest.mark.parametrize(
    ("layers", "pace", "count"), [(7, 6, 7), (16, 2, 8), (16, 6, 8), (16, 12, 8)]
)
@pytest.mark.parametrize("order", ["zigzag", "stop-the-world", "overlap"])
def test_with_messages_that_take_no_time_the_protocol_costs_nothing(
    order: str, layers: int, pace: int, count: int
) -> None:
    played = play(LIVE_ORDERS[order], layers, [1] * count, loaded_every(pace, layers))
    run = pair(order, layers, pace, count)
    assert run.first_token_ns == [UNIT_NS * end for end in played.finished_ns]
    assert run.finished_ns == run.first_token_ns
    first_help = next((s.start_ns * UNIT_NS for s in played.stretches if s.on_target), None)
    assert first_help == next((w.start_ns for w in run.works if w.on_target), None)


@settings(max_examples=examples(40))
@given(
    st.integers(2, 8),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 700), st.integers(1, 3)), min_size=1, max_size=6),
    st.integers(0, 2_000_000),
    st.sampled_from([None, 10**9]),
    st.integers(1, 4),
    st.sampled_from(sorted(LIVE_ORDERS)),
)
def test_every_prompt_is_computed_once_and_in_order(
    layers: int,
    pace: int,
    batches: list[tuple[int, int]],
    message_ns: int,
    bytes_per_s: int | None,
    output_tokens: int,
    order: str,
) -> None:
    tokens, times = zip(*batches, strict=True)
    loaded = [UNIT_NS * at for at in loaded_every(pace, layers)]
    load = PairLoad(
        order=order,
        layers=layers,
        batch_layer_ns=tuple(UNIT_NS * each for each in times),
        arrived_ns=(0, *loaded, loaded[-1]),
        message_ns=message_ns,
        bytes_per_s=bytes_per_s,
        row_bytes=100,
        kv_layer_bytes=40,
        tokens=tokens,
        decodes=2,
        decode_ns=UNIT_NS // 4,
        output_tokens=output_tokens,
        limits=LiveLimits(span_ns=2 * UNIT_NS, gap_ns=2 * UNIT_NS),
    )
    run = PairWorld(load).play()
    computed = [0] * len(tokens)
    free_ns = {True: 0, False: 0}
    for work in run.works:
        assert work.start_ns >= free_ns[work.on_target]
        free_ns[work.on_target] = work.stop_ns
        if work.on_target and work.batches:
            last = work.span.stop - 1
            assert work.start_ns >= [0, *loaded, loaded[-1]][last]
        for number in work.batches:
            # A source that takes a batch without its rows begins the batch anew.
            is_anew = not work.on_target or computed[number] == layers + 2
            assert computed[number] == work.span.start or (work.span.start == 0 and is_anew)
            computed[number] = work.span.stop
    assert computed == [layers + 2] * len(tokens)
    if output_tokens == 1:
        assert run.first_token_ns == run.finished_ns
    else:
        ends = zip(run.first_token_ns, run.finished_ns, strict=True)
        assert all(first < last for first, last in ends)


def test_decodes_of_the_source_go_on_between_the_layers_of_a_batch() -> None:
    """At most two layers of somebody's prompt between two tokens, where without help a whole
    prompt comes between."""
    more = {"decodes": 4, "decode_ns": UNIT_NS // 2, "message_ns": UNIT_NS // 10}
    live = pair(
        "zigzag", 16, 6, 8, **more, limits=LiveLimits(span_ns=2 * UNIT_NS, gap_ns=2 * UNIT_NS)
    )
    alone = pair("stop-the-world", 16, 6, 8, **more)
    assert max(live.tbt_ns) == 2 * UNIT_NS + UNIT_NS // 2
    assert max(alone.tbt_ns) == 16 * UNIT_NS + UNIT_NS // 2
    assert max(live.first_token_ns) < max(alone.first_token_ns)


def test_rows_and_kv_are_counted_and_take_their_time() -> None:
    more = {
        **{"row_bytes": 1_000, "kv_layer_bytes": 100, "message_ns": UNIT_NS // 10},
        **{
            "output_tokens": 2,
            "decode_ns": UNIT_NS // 4,
            "limits": LiveLimits(span_ns=UNIT_NS, gap_ns=UNIT_NS),
        },
    }
    slow = pair("zigzag", 16, 6, 8, **more, bytes_per_s=10**8)
    fast = pair("zigzag", 16, 6, 8, **more)
    for run in (slow, fast):
        helped = [0] * 8
        for work in run.works:
            for number in work.batches if work.on_target else ():
                helped[number] = work.span.stop - 1
        expected = [512 * (1_000 + 100 * layers) for layers in helped if layers]
        assert run.moved_bytes == sum(expected)
        assert run.handovers == 8
    assert max(slow.first_token_ns) > max(fast.first_token_ns)
    # What the protocol costs: with messages of a tenth of a layer, and decodes, 5 % of the last.
    assert max(fast.first_token_ns) <= 75 * UNIT_NS
    assert slow.rate(0, 10**9) == fast.rate(0, 10**9) == pytest.approx(8 * 16 / 1000)


def test_a_load_that_makes_no_sense_is_said() -> None:
    with pytest.raises(ValueError, match="no live order 'zag'"):
        pair("zag", 4, 1, 2)
    with pytest.raises(ValueError, match="2 times for 3 batches"):
        pair("zigzag", 4, 1, 2, tokens=(1, 2, 3))
    with pytest.raises(ValueError, match="decodes take time"):
        pair("zigzag", 4, 1, 2, decodes=1)


def test_spans_of_a_batch_meet() -> None:
    run = pair("zigzag", 7, 6, 7)
    spans = [work.span for work in run.works if 6 in work.batches]
    assert spans[0].start == 0
    assert spans[-1] == LayerSpan(6, 9)
