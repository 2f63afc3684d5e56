"""Requests that an executor cannot compute end alone: the others of their Runs get their tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from engine_instance import BLOCK_TOKENS, judge, request
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.faulty_runs import FaultyRequest, RunFailed, find_faulty
from livescale.batching.runs.run import Run, Segment, SequenceSpec
from livescale.engine.base.errors import spoils_device
from livescale.engine.executor import TorchExecutor
from livescale.engine.oracle import GreedyOracle
from livescale.runtime.member_process.faulty_pieces import run_or_pieces
from livescale.values.types import LayerSpan, SamplingParams

Outputs = dict[str, list[int]]


def served(executor: TorchExecutor, specs: list[SequenceSpec]) -> tuple[Outputs, dict[str, str]]:
    """Tokens by request, and why others failed."""
    config = BatcherConfig(executor.kv_blocks, BLOCK_TOKENS, 64, 8)
    batcher = LiveBatcher(Batcher(config, LayerSpan(0, 6)), 1, LiveLimits())
    batcher.layers_arrived(6)
    for spec in specs:
        batcher.add(spec)
    outputs, failed = defaultdict(list), {}
    while (run := batcher.next()) is not None:
        result, faulty = run_or_pieces(executor, run, None, None, 0)
        if faulty:
            batcher.fail(run, faulty)
        for emitted in batcher.done(run, [[token] for token in result.token_ids], 1):
            outputs[emitted.request] += emitted.token_ids
        for name, _, reason in batcher.take_refused():
            assert name not in failed
            failed[name] = reason
        batcher.validate()
    assert batcher.batcher.pool.used == 0
    return dict(outputs), failed


def poisoned(spec: SequenceSpec, place: int) -> SequenceSpec:
    """With an id that the model has not."""
    ids = list(spec.prompt_ids)
    ids[place] = 1024
    return replace(spec, prompt_ids=tuple(ids))


@pytest.mark.parametrize("model", ["tiny", "tied"])
def test_others_of_the_run_get_their_tokens(
    executors: dict[str, TorchExecutor], oracles: dict[str, GreedyOracle], model: str
) -> None:
    right = [request(f"r{n}", 5 + 7 * n, 6) for n in range(5)]
    wrong = [poisoned(request("p0", 9, 6), 0), poisoned(request("p1", 70, 6), 69)]
    # It begins as one that fails: what that one left is not taken for computed.
    like = replace(right[0], request="like", prompt_ids=(*wrong[1].prompt_ids[:69], 5))
    specs = [right[0], wrong[0], *right[1:3], wrong[1], *right[3:], like]
    outputs, failed = served(executors[model], specs)
    assert failed.keys() == {"p0", "p1"}
    assert all("IndexError" in reason for reason in failed.values())
    judge(oracles[model], [*right, like], outputs)


def test_all_of_a_run_may_fail(executors: dict[str, TorchExecutor]) -> None:
    specs = [poisoned(request(f"p{n}", 4, 2), 1) for n in range(3)]
    outputs, failed = served(executors["tiny"], specs)
    assert not outputs
    assert failed.keys() == {"p0", "p1", "p2"}


@given(faulty=st.lists(st.booleans(), min_size=1, max_size=40))
def test_those_at_fault_are_found_and_no_others(faulty: list[bool]) -> None:
    segments = tuple(
        Segment(f"r{n}", n, 0, (n,), (n,), True, SamplingParams(1)) for n in range(len(faulty))
    )
    runs = []

    def execute(piece: Run) -> list[str]:
        runs.append(piece)
        names = [segment.request for segment in piece.segments]
        if any(faulty[segment.attempt] for segment in piece.segments):
            raise RunFailed(f"one of {names}")
        return names

    done, found = find_faulty(Run(1, LayerSpan(0, 3), segments), RunFailed("all"), execute)
    at_fault = [n for n, is_faulty in enumerate(faulty) if is_faulty]
    if len(faulty) == 1:
        assert found == [FaultyRequest("r0", 0, "all")]
        return
    assert [(one.request, one.attempt) for one in found] == [(f"r{n}", n) for n in at_fault]
    assert all(one.reason == f"one of ['{one.request}']" for one in found)
    assert [name for _, names in done for name in names] == [
        f"r{n}" for n, is_faulty in enumerate(faulty) if not is_faulty
    ]
    levels = len(faulty).bit_length() + 1
    assert len(runs) <= 2 + 2 * len(at_fault) * levels


@pytest.mark.parametrize(
    ("error", "is_devices"),
    [
        (IndexError("index out of range in self"), False),
        (ValueError("3 is no token"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (AssertionError("layer 3 is not materialized"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
    ],
)
def test_errors_after_which_a_device_is_not_trusted(error: Exception, is_devices: bool) -> None:
    assert spoils_device(error) == is_devices
