"""Cores of a CPU worker change while requests run: threads and affinity, tokens and event."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from thread_workers import ThreadWorker, all_from

from livescale.engine.files.model_files import read_manifest
from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import SetCores
from livescale.messages.events import CoresChanged, HoldingCompleted, RequestEnded
from livescale.runtime.wire.protocol import Order, Submit, Tokens
from livescale.values.types import SamplingParams

CPUS = len(os.sched_getaffinity(0))
TOKENS = 40
PROMPT = tuple(range(5, 40))


@pytest.fixture
def worker(machine: None) -> Iterator[ThreadWorker]:
    torch.set_num_threads(1)
    made = ThreadWorker(1, 8 << 20)
    yield made
    made.close()
    torch.set_num_threads(1)


def order(worker: ThreadWorker, cores: int) -> CoresChanged:
    worker.host.obey(Order(SetCores(worker.ref, cores)))
    [*_, told] = worker.heard(lambda word: isinstance(word, CoresChanged))
    assert isinstance(told, CoresChanged)
    return told


def in_use(worker: ThreadWorker) -> tuple[int, int]:
    """Threads, and CPUs on which they may run, of the thread that computes."""
    found: list[object] = []

    def look() -> None:
        found.append((torch.get_num_threads(), len(os.sched_getaffinity(0))))
        worker.said.put(found)

    worker.host.post(look)
    worker.heard(lambda word: word is found)
    [its] = found
    assert isinstance(its, tuple)
    return its


def ask(worker: ThreadWorker, name: str) -> None:
    worker.submit(Submit(name, 1, 1, PROMPT, (), SamplingParams(TOKENS)))


def test_cores_change_in_the_middle_of_a_request(worker: ThreadWorker, tiny_model: Path) -> None:
    manifest, oracle = read_manifest(tiny_model, "tiny"), GreedyOracle(tiny_model)
    worker.load(1, manifest, all_from(manifest, None), directory=str(tiny_model))
    worker.heard(lambda word: isinstance(word, HoldingCompleted))
    assert in_use(worker) == (1, CPUS)
    for name, cores, used in (("a", 2, min(2, CPUS)), ("b", CPUS + 5, CPUS), ("c", 1, 1)):
        ask(worker, name)
        first = worker.heard(lambda word: isinstance(word, Tokens))
        worker.host.obey(Order(SetCores(worker.ref, cores)))
        words = [*first, *worker.heard(lambda word: isinstance(word, RequestEnded))]
        if not any(isinstance(word, CoresChanged) for word in words):
            # The request was quicker than the order.
            words += worker.heard(lambda word: isinstance(word, CoresChanged))
        assert [word for word in words if isinstance(word, CoresChanged)] == [
            CoresChanged(worker.ref, used, asked=cores)
        ]
        tokens = [t.token_id for word in words if isinstance(word, Tokens) for t in word.tokens]
        assert len(tokens) == TOKENS
        assert oracle.check(PROMPT, tokens).is_right
        # The order may have come behind the last Run: cores change before the next one.
        ask(worker, f"{name}, then")
        worker.heard(lambda word: isinstance(word, RequestEnded))
        # With what it began with it may run wherever it might.
        assert in_use(worker) == (used, CPUS if used == 1 else used)
        assert worker.host.member.cores.now == used


def test_an_idle_worker_answers_at_once(worker: ThreadWorker) -> None:
    assert order(worker, 2).cores == min(2, CPUS)
    assert order(worker, 1).cores == 1
