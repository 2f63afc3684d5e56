"""Processes die and links are cut while models are multicast, and while loading instances help:
nothing is lost, nothing is wrong.

One round by default; `make chaos` runs many. Each third one is of a model in stages. A round's name
has its pool, fault and seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from chaos_round import (
    LINK_BITS_PER_S,
    PAIR_FAULTS,
    ROLE_FAULTS,
    TEAM_FAULTS,
    TOKENS,
    WHOLE_FAULTS,
    ChaosPool,
    check_invariants,
)
from completions import Answer, check
from pool_thread import LocalPool
from stage_faults import REPLICAS, STAGE_FAULTS

from livescale.engine.oracle import GreedyOracle
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec, TestbedError, goodput_bytes_per_s
from livescale.telemetry.record.record import read_record
from livescale.telemetry.replay import replay

pytestmark = pytest.mark.usefixtures("machine")
ROUNDS = 1
HOSTS = {"timed": 4, "real": 3, "pair": 3, "roles": 4, "teams": 4, "stages": 4, "parts": 7}
# The workers of "stages" compute, those of "parts" are timed.
STAGES = {"stages": 2, "parts": 3}
# Streams of these come by two gateways.
TWO_GATEWAYS = ("timed", "roles", "parts")
SETTINGS = "    prefill_tokens_per_s: 1000\n"
LIMITS = {
    "roles": "    roles: {prefill: {max_replicas: 2}, decode: {max_replicas: 2}}\n",
    "teams": "    min_replicas: 2\n",
    **{kind: f"    stages: {n}\n    min_replicas: 2\n" for kind, n in STAGES.items()},
}
# Each third round is of stages, and every second of these is timed.
STAGES_EVERY = 3
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
    rounds = metafunc.config.getoption("--rounds") or ROUNDS
    seed = metafunc.config.getoption("--seed", 0)
    faults = metafunc.config.getoption("--faults", None)
    only = metafunc.config.getoption("--pool", None)
    cases = []
    for number in range(rounds):
        fault, turn = _fault(number) if faults is None else _nth(faults.split(","), number)
        kind = "real" if turn % REAL_EVERY == 2 else "timed"
        is_still = random.Random(seed + number).random() < STILL_SHARE
        if fault in PAIR_FAULTS:
            kind = "pair"
        elif fault in ROLE_FAULTS:
            kind = "roles"
        elif fault in TEAM_FAULTS:
            kind = "teams"
        elif fault in STAGE_FAULTS:
            kind = "parts" if (turn + turn // len(STAGE_FAULTS)) % 2 else "stages"
        elif is_still and number >= LIVE_FIRST:
            kind += "_still"
        cases.append((only or kind, fault, seed + number))
    # The rounds of one pool follow one another.
    cases.sort(key=lambda case: case[0])
    metafunc.parametrize("chaos_round", cases, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")


def _fault(number: int) -> tuple[str, int]:
    """Of the round with this number, and which round of whole models or of stages this is."""
    stages = (number + 1) // STAGES_EVERY
    if number % STAGES_EVERY == 1:
        return _nth(STAGE_FAULTS, stages)
    return _nth(WHOLE_FAULTS, number - stages)


def _nth(faults: Sequence[str], turn: int) -> tuple[str, int]:
    return faults[turn % len(faults)], turn


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
    elif device_kind == "roles":
        device = {"device": "timed", "timed_run_us": 3000, "run_tokens_max": 64}
    elif device_kind == "teams":
        # Workers compute: two have the model, from whom the others get different parts first.
        teams = {"multicast": "binomial", "teams": "pairs", "run_tokens_max": 64}
        device = {"host_memory_bytes": 0, **teams}
        still = "still"
    elif device_kind in STAGES:
        # Requests are to be on their way when their pipelines are hit.
        still = "still"
        device = {"scale_down_timeout_ms": 100}
        if device_kind == "parts":
            device |= {"device": "timed", "timed_run_us": 9000}
    order = "stop-the-world" if still else "zigzag"
    try:
        with LocalPool(
            model,
            scratch,
            SETTINGS + LIMITS.get(device_kind, ""),
            bed,
            workers=hosts,
            gateways=2 if device_kind in TWO_GATEWAYS else 1,
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
            right = TimedAnswers() if "device" in device else RealAnswers(model)
            least = REPLICAS * STAGES[device_kind] if device_kind in STAGES else 1
            least = 2 if device_kind in ("roles", "teams") else least
            chaos = ChaosPool(pool, bed, right, least)
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
    taken, teams = chaos.batches_taken, chaos.teams_formed
    hit = f"{chaos.pipelines_hit} pipelines hit"
    print(f"{kind}: {chaos.rounds} rounds, {taken} batches taken over, {teams} teams formed, {hit}")
    record = read_record(chaos.pool.record)
    assert replay(record).lives >= 1
    check_invariants(chaos.pool.record)
    if chaos.rounds >= LEAK_ROUNDS_MIN:
        if kind == "teams":
            assert chaos.teams_formed, "no round had a team"
        elif kind in STAGES:
            assert chaos.pipelines_hit, "no round hit a pipeline in use"
        elif kind not in ("pair", "roles"):
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


@pytest.fixture(scope="module")
def roles(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("roles", tiny_model, tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="module")
def teams(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("teams", tiny_model, tmp_path_factory.mktemp("teams"))


@pytest.fixture(scope="module")
def stages(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("stages", tiny_model, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def parts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosPool]:
    yield from made_pool("parts", tiny_model, tmp_path_factory.mktemp("parts"))


def test_a_round(chaos_round: tuple[str, str, int], request: pytest.FixtureRequest) -> None:
    kind, fault, seed = chaos_round
    chaos: ChaosPool = request.getfixturevalue(kind)
    if fault in ("link", "visit", "stage_link") and chaos.bed is None:
        pytest.skip(f"round {seed}: links can be cut only in a testbed (root, iproute2)")
    print(f"round {seed}: {fault}: we {chaos.round(fault, seed)}")
