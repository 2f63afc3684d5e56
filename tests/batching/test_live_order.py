"""Live orders: BlitzScale's Figure 15 to the unit, alone and by two instances that talk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_parts import Target
from live_worlds import LiveWorld

from effort import examples
from livescale.batching.contract.live_order import LIVE_ORDERS, LiveOrder, Progress
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.messages.scale_plan import pair_rate, pair_until
from livescale.values.types import WorkerRef

_LAYERS = 7
#: one layer of one batch
_UNIT = 100
_TOKENS = 20


def played(order: LiveOrder, layers: int, loaded_at: Sequence[int], batches: int) -> list[int]:
    """When each of equal batches that wait from 0 on is done, by the order alone: a layer takes a
    unit, and whatever one instance finishes, the other knows at once."""
    line = [Progress() for _ in range(batches)]
    number = {id(batch): index for index, batch in enumerate(line)}
    done = [0] * batches
    target: tuple[int, Progress, int] | None = None
    source_free, now = 0, 0
    while line:
        if target is not None and target[0] == now:
            batch, layers_run = target[1], target[2]
            batch.is_running = False
            batch.layers_done += layers_run
            target = None
            if batch.layers_done == layers:
                line.remove(batch)
                done[number[id(batch)]] = now
        loaded = sum(at <= now for at in loaded_at)
        if source_free <= now:
            index = order.source_pull(line, loaded, layers)
            if index is not None:
                batch = line.pop(index)
                source_free = now + layers - batch.layers_done
                done[number[id(batch)]] = source_free
        if target is None:
            turn = order.target_turn(line, loaded, layers)
            if turn is not None:
                batch = line[turn.batch]
                batch.had_turn = batch.is_running = True
                target = (now + turn.layers, batch, turn.layers)
        now += 1
    return done


def talked(order: str, layers: int, loaded_at: Sequence[int], batches: int) -> list[float]:
    """As `played`, by the LiveBatchers of two instances."""
    config = BatcherConfig(32, 16, 64, 16, growth_tokens=0)
    # The embedding rides with the first layer, the head with the last.
    layer_ns = [0, *(at * _UNIT for at in loaded_at), loaded_at[-1] * _UNIT]
    # Messages take no time: asking for a batch early would only leave the target less time for it.
    limits = LiveLimits(
        batches_max=64,
        batch_tokens_max=_TOKENS,
        span_ns=_UNIT,
        gap_ns=_UNIT,
        pull_early_permille=0,
    )
    target = Target(tuple(layer_ns), config, order)
    world = LiveWorld(layers, config, [target], limits, token_layer_ns=_UNIT // _TOKENS)
    names = [f"r{number}" for number in range(batches)]
    for name in names:
        world.at(0, lambda r=name: world.request(r, WorkerRef(1), range(_TOKENS), 1, salt=r))
    world.play()
    world.check_end()
    return [world.transcripts[name].finished_ns / _UNIT for name in names]


_FIGURE_15 = [6 * layer for layer in range(_LAYERS)]


def test_figure_15_zigzag() -> None:
    expected = [7, 12, 17, 21, 24, 27, 29]
    assert played(LIVE_ORDERS["zigzag"], _LAYERS, _FIGURE_15, 7) == expected


def test_figure_15_best_effort() -> None:
    """(1, 6) for the first six requests, (2, 5) for the last (Figure 15 a)."""
    expected = [7, 13, 19, 25, 31, 37, 42]
    assert played(LIVE_ORDERS["best-effort"], _LAYERS, _FIGURE_15, 7) == expected


def test_figure_15_zigzag_by_two_instances() -> None:
    assert talked("zigzag", _LAYERS, _FIGURE_15, 7) == [7, 12, 17, 21, 24, 27, 29]


def test_figure_9_first_result_of_the_new_instance_alone() -> None:
    """BlitzScale Figure 9 c: layer k arrives 6 k after the start of loading. Layers are run as
    they arrive, or all 7 after the last."""
    loaded_at = [6 * layer for layer in range(1, _LAYERS + 1)]
    assert talked("overlap", _LAYERS, loaded_at, 1) == [43]
    assert played(LIVE_ORDERS["overlap"], _LAYERS, loaded_at, 1) == [43]
    assert talked("stop-the-world", _LAYERS, loaded_at, 1) == [49]


def test_rates_of_a_pair() -> None:
    """BlitzScale §4: with one layer of 7 a pair gives 1/6 instead of 1/7 per unit, and twice one
    instance's rate from half of the layers on."""
    assert pair_rate(0, 7) == (7, 7)
    assert pair_rate(1, 7) == (7, 6)
    assert all(pair_rate(loaded, 8) == (8, 4) for loaded in range(4, 9))
    for loaded, layers in itertools.product(range(81), (7, 32, 80)):
        if loaded <= layers:
            fast, slow = pair_rate(loaded, layers)
            assert layers <= 2 * slow
            assert fast == layers


@given(
    tokens=st.integers(0, 100_000),
    lag=st.integers(0, 50_000),
    layers=st.integers(1, 100),
    data=st.data(),
)
def test_a_pair_is_between_one_instance_and_two(
    tokens: int, lag: int, layers: int, data: st.DataObject
) -> None:
    loaded = data.draw(st.integers(0, layers))
    at = pair_until(tokens, lag, loaded, layers)
    assert tokens * 500 <= at <= tokens * 1000
    assert at <= pair_until(tokens + 1, lag, loaded, layers), "more is never done sooner"
    assert at <= pair_until(tokens, lag + layers, loaded, layers) + layers
    if loaded == layers or not lag:
        assert at == tokens * 500
    # While nothing is there it is one instance; each layer takes a part of the load.
    if not loaded and tokens * layers <= lag:
        assert at == tokens * 1000


@pytest.mark.parametrize("loaded", [1, 2, 4, 6])
def test_the_rate_is_reached(loaded: int) -> None:
    """In steady state, with so many of 8 layers there and the others far away."""
    batches = 40
    loaded_at = [0] * loaded + [100_000] * (8 - loaded)
    done = sorted(played(LIVE_ORDERS["zigzag"], 8, loaded_at, batches))
    layers, per_batch = pair_rate(loaded, 8)
    assert layers == 8
    steady = (done[-1] - done[9]) / (batches - 10)
    assert steady <= per_batch + 1 / 3


@settings(max_examples=examples(60))
@given(
    layers=st.integers(1, 8),
    gaps=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    batches=st.integers(1, 7),
)
def test_two_instances_come_close_to_what_the_order_allows(
    layers: int, gaps: list[int], batches: int
) -> None:
    """A batch that is pulled may have to wait for the end of the layer in flight."""
    loaded_at = list(itertools.accumulate(gaps[:layers]))
    ideal = played(LIVE_ORDERS["zigzag"], layers, loaded_at, batches)
    real = talked("zigzag", layers, loaded_at, batches)
    assert max(real) <= max(ideal) + batches


class CountedLine(list[Progress]):
    """Counts how many batches a decision looks at."""

    looks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        for batch in super().__iter__():
            self.looks += 1
            yield batch

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("name", sorted(LIVE_ORDERS))
def test_deciding_looks_at_each_batch_once(name: str) -> None:
    for batches, loaded in itertools.product((1, 4, 16), (0, 1, 40, 80)):
        line = CountedLine(Progress(min(loaded, number), number > 2) for number in range(batches))
        LIVE_ORDERS[name].target_turn(line, loaded, 80)
        LIVE_ORDERS[name].source_pull(line, loaded, 80)
        assert line.looks <= 2 * batches + 3
