"""Processes die and links are cut while models are multicast, and while loading instances help:
nothing is lost, nothing is wrong.

Two rounds by default; `make chaos` runs many. A round's name has its pool, fault and seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_round import (
    FAULTS,
    LINK_BITS_PER_S,
    PAIR_FAULTS,
    TOKENS,
    ChaosPool,
    check_invariants,
)
from completions import Answer, check
from pool_thread import LocalPool

from livescale.engine.oracle import GreedyOracle
from livescale.telemetry.record import read_record
from livescale.telemetry.replay import replay
from livescale.testbed.bed import Testbed
from livescale.testbed.spec import NetworkSpec, TestbedError, goodput_bytes_per_s

pytestmark = [pytest.mark.pool, pytest.mark.chaos]
HOSTS = {"timed": 4, "real": 3, "pair": 3}
# A fifth of the rounds compute for real.
REAL_EVERY = 5
# A third of them wait for complete instances; not the first ones, which would need further pools.
LIVE_FIRST, STILL_SHARE = 3, 1 / 3
# Fewer rounds show no growth.
LEAK_ROUNDS_MIN = 6
DESCRIPTORS_SLACK = 12
RSS_SLACK_BYTES = 64 << 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_round" not in metafunc.fixturenames:
        return
    rounds = metafunc.config.getoption("--rounds")
    seed = metafunc.config.getoption("--seed", 0)
    faults = metafunc.config.getoption("--faults", None)
    faults = FAULTS if faults is None else faults.split(",")
    only = metafunc.config.getoption("--pool", None)
    cases = []
    for number in range(rounds):
        fault = faults[number % len(faults)]
        kind = "real" if number % REAL_EVERY == 2 else "timed"
        is_still = random.Random(seed + number).random() < STILL_SHARE
        if fault in PAIR_FAULTS:
            kind = "pair"
        elif is_still and number >= LIVE_FIRST:
            kind += "_still"
        cases.append((only or kind, fault, seed + number))
    # The rounds of one pool follow one another.
    cases.sort(key=lambda case: case[0])
    metafunc.parametrize("chaos_round", cases, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")


def made_pool(kind: str, model: Path, scratch: Path) -> Iterator[ChaosPool]:
    device_kind, _, still = kind.partition("_")
    hosts = HOSTS[device_kind]
    rate = goodput_bytes_per_s(LINK_BITS_PER_S)
    bed: Testbed | None = Testbed(NetworkSpec(hosts=hosts, link_bits_per_s=LINK_BITS_PER_S))
    try:
        bed.__enter__()
    except TestbedError:
        bed = None
    links = {} if bed is not None else {"uplink_bytes_per_s": rate, "downlink_bytes_per_s": rate}
    device: dict[str, object] = {}
    if device_kind == "timed":
        device = {"device": "timed", "timed_run_us": 3000}
    elif device_kind == "pair":
        # Everything comes over the links, and prompts that wait can be shared: those that an
        # instance has already are its own.
        device = {"host_memory_bytes": 0, "dispatched_ahead_max": 2, "run_tokens_max": 64}
    order = "stop-the-world" if still else "zigzag"
    try:
        with LocalPool(
            model,
            scratch,
            "    prefill_tokens_per_s: 1000\n",
            bed,
            workers=hosts,
            sequences_max=16 if device_kind == "pair" else 8,
            prefill_queue_upper_ms=100,
            prefill_queue_lower_ms=50,
            request_attempts_max=6,
            stall_ms=500,
            live_order=order,
            live_over_ms=0,
            live_pairs="always",
            # Each round is to load: no spares, but where workers compute.
            scaling_policy="bounds",
            spares_ahead="none",
            warm_spares="recent" if device_kind == "real" else "off",
            **links,
            **device,
        ) as pool:
            right = TimedAnswers() if device_kind == "timed" else RealAnswers(model)
            chaos = ChaosPool(pool, bed, right)
            chaos.rest("have done nothing")
            yield chaos
        report(kind, chaos)
    finally:
        if bed is not None:
            bed.close()


class TimedAnswers:
    """A made-up token depends on the prompt and the position alone, whoever makes it up."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, answers: list[Answer]) -> None:
        for answer in answers:
            known = self._known.setdefault(tuple(answer.prompt_ids), answer.token_ids)
            assert answer.token_ids == known


class RealAnswers:
    """The oracle's word on every token."""

    def __init__(self, model: Path) -> None:
        self._oracle = GreedyOracle(model)

    def __call__(self, answers: list[Answer]) -> None:
        check(self._oracle, answers, TOKENS)


def report(kind: str, chaos: ChaosPool) -> None:
    """What must hold over all rounds of a pool, which has ended by now."""
    print(f"{kind}: {chaos.rounds} rounds, {chaos.batches_taken} batches were taken over")
    record = read_record(chaos.pool.record)
    assert replay(record).lives >= 1
    check_invariants(chaos.pool.record)
    if chaos.rounds >= LEAK_ROUNDS_MIN:
        if kind != "pair":
            assert chaos.hurt_rounds, "no round hit a load that was under way"
        for name, looks in chaos.looks.items():
            third = len(looks) // 3
            early, late = looks[:third], looks[-third:]
            grown = max(x.descriptors for x in late) - max(x.descriptors for x in early)
            assert grown <= DESCRIPTORS_SLACK, f"{kind}: {name} leaks descriptors: {looks}"
            more = max(x.rss_bytes for x in late) - max(x.rss_bytes for x in early)
            assert more <= RSS_SLACK_BYTES, f"{kind}: {name} leaks memory: {looks}"


@pytest.fixture(scope="module")
def timed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("timed", tiny_model, tmp_path_factory.mktemp("timed"))


@pytest.fixture(scope="module")
def real(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("real", tiny_model, tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def timed_still(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("timed_still", tiny_model, tmp_path_factory.mktemp("timed-still"))


@pytest.fixture(scope="module")
def real_still(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("real_still", tiny_model, tmp_path_factory.mktemp("real-still"))


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("pair", tiny_model, tmp_path_factory.mktemp("pair"))


def test_a_round(chaos_round: tuple[str, str, int], request: pytest.FixtureRequest) -> None:
    kind, fault, seed = chaos_round
    chaos: ChaosPool = request.getfixturevalue(kind)
    if fault == "link" and chaos.bed is None:
        pytest.skip(f"round {seed}: links can be cut only in a testbed (root, iproute2)")
    print(f"round {seed}: {fault}: we {chaos.round(fault, seed)}")
