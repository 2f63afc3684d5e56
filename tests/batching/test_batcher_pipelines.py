"""Several Runs of one Batcher in flight: each of other requests, ended in any order."""

from __future__ import annotations

import random

from hypothesis import event, given, settings
from hypothesis import strategies as st
from kv_double import KVDouble, reference

from effort import examples
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams


@given(
    st.integers(1, 5),
    st.integers(3, 12),
    st.integers(1, 6),
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 20)), min_size=2, max_size=12),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(600), deadline=None)
def test_runs_of_other_requests_end_in_any_order(
    runs_max: int,
    kv_blocks: int,
    sequences_max: int,
    spare_tokens: int,
    growth_tokens: int,
    sizes: list[tuple[int, int]],
    is_shared: bool,
    cancels: bool,
    chance: random.Random,
) -> None:
    config = BatcherConfig(
        kv_blocks, 4, sequences_max + spare_tokens, sequences_max, 50, growth_tokens
    )
    batcher = Batcher(config, LayerSpan(0, 3), runs_max)
    executor = KVDouble.of(batcher)
    specs: dict[str, SequenceSpec] = {}
    tokens: dict[str, list[int]] = {}
    for number, (prompt, output) in enumerate(sizes):
        request = f"r{number}"
        salt = "" if is_shared else request
        spec = SequenceSpec(request, 1, range(prompt), SamplingParams(output), cache_salt=salt)
        if prompt + output - 1 > batcher.tokens_held_max():
            continue
        specs[request], tokens[request] = spec, []
        executor.expect(spec)
    waiting = list(specs)
    cancelled: set[str] = set()
    in_flight: list[tuple[Run, list[int]]] = []
    most = 0
    while waiting or batcher.has_work:
        if waiting and chance.random() < 0.5:
            batcher.add(specs[waiting.pop(0)])
        if cancels and chance.random() < 0.05:
            request = chance.choice(list(specs))
            if batcher.cancel(request, 1):
                cancelled.add(request)
        while len(in_flight) < runs_max and (run := batcher.next()) is not None:
            flying = {s.request for other, _ in in_flight for s in other.segments}
            assert not flying & {s.request for s in run.segments}, "of other requests"
            in_flight.append((run, executor.run(run)))
            most = max(most, len(in_flight))
            batcher.validate()
        assert in_flight or waiting or not batcher.has_work, "something runs"
        if in_flight and (not waiting or chance.random() < 0.7):
            run, sampled = in_flight.pop(chance.randrange(len(in_flight)))
            for emitted in batcher.done(run, [[token_id] for token_id in sampled]):
                assert emitted.request not in cancelled
                tokens[emitted.request] += emitted.token_ids
            batcher.validate()
    assert batcher.pool.used == 0
    for request, spec in specs.items():
        expected = reference(spec)
        got = tokens[request]
        assert got == (expected[: len(got)] if request in cancelled else expected)
    event(f"most Runs in flight: {most}")
    event(f"preempted: {batcher.room.preemptions > 0}")


def test_decodes_are_shared_among_the_runs() -> None:
    """Nine requests and three Runs: three each, so that no instance of a line is idle."""
    batcher = Batcher(BatcherConfig(64, 4, 64, 16), LayerSpan(0, 3), runs_max=3)
    for number in range(9):
        batcher.add(SequenceSpec(f"r{number}", 1, range(4), SamplingParams(20)))
    for _ in range(4):
        runs = [batcher.next() for _ in range(3)]
        assert [len(run.segments) for run in runs if run is not None] == [3, 3, 3]
        for run in runs:
            assert run is not None
            batcher.done(run, [[1]] * 3)
