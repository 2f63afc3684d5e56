"""Live scaling in whole worlds: loading instances help, nothing is lost, records stay the same."""

from __future__ import annotations

import gc
import io
import itertools
import os
import random
import subprocess
import sys
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import MIB, MS, Row, make_config, make_device, make_model

from livescale.batching.contract.live_messages import KvLayer, Pull
from livescale.batching.runs.run import BatchKey
from livescale.clusters.topology import Topology
from livescale.latency.shapes import LLAMA_3_8B
from livescale.member.effects import TellPeer
from livescale.member.inputs import MemberInput, PeerLost, PeerMessage, PeerSent
from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, InstanceReported, LayerArrived, LiveStarted
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.links.live_link import LiveLink
from livescale.sim.links.transfers import Transfers, TransferTimes
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.bindings import Binding, EarlyBinding, LateBinding
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Outcome, WorkerRef

_S = 1000 * MS
_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from worlds import make_world
from livescale.sim.world.simulate import simulate
for seed in (5, 32, 39):
    world = make_world(seed)
    assert world.config.controller.live_order != "stop-the-world"
    simulate(world.rows, world.config, seed, sys.stdout.buffer)
"""


def config_of(live_order: str, tp_size: int = 1, binding: Binding | None = None) -> SimConfig:
    """One instance of an 8B model and room for another one, which gets its parameters from the
    first at 100 Gbit/s: in 1.3 s, while one instance computes ten prompts of 2000 tokens."""
    spec = msgspec.structs.replace(LLAMA_3_8B, row_bytes_per_token=8192, tp_size=tp_size)
    config = SimConfig.default(spec, workers=2 * tp_size)
    policy = msgspec.structs.replace(config.controller.models[0], instances_max=2)
    controller = msgspec.structs.replace(
        config.controller,
        models=(policy,),
        live_order=live_order,
        binding=binding or LateBinding(),
    )
    return msgspec.structs.replace(config, controller=controller)


def burst(
    live_order: str, output_tokens: int = 20, tp_size: int = 1, binding: Binding | None = None
) -> tuple[SimResult, bytes]:
    """40 requests of 2000 tokens within 40 ms, when the first instance has long been there."""
    rows = [Row(30 * _S + number * MS, 2000, output_tokens) for number in range(40)]
    file = io.BytesIO()
    return simulate(rows, config_of(live_order, tp_size, binding), 1, file), file.getvalue()


def first_token_ms(result: SimResult) -> list[float]:
    return sorted((line.token_ns[0] - line.queued_ns) / MS for line in result.requests)


def events(record: bytes, tmp_path: Path) -> list[object]:
    path = tmp_path / "record.jsonl"
    path.write_bytes(record)
    steps = (line for line in read_record(path) if isinstance(line, StepLine))
    return [said for step in steps for said in (*step.events, *step.commands)]


@pytest.mark.parametrize(
    ("binding", "last", "mean_part"), [(EarlyBinding(), 0.67, 0.67), (LateBinding(), 0.9, 0.85)]
)
def test_the_last_of_a_burst_wait_less_for_a_loading_instance_that_helps(
    binding: Binding, last: float, mean_part: float
) -> None:
    found = {}
    for order in ("stop-the-world", "overlap", "best-effort", "zigzag"):
        result, _ = burst(order, binding=binding)
        assert {line.outcome for line in result.requests} == {Outcome.FINISHED}
        assert all(line.attempts == 1 for line in result.requests)
        found[order] = first_token_ms(result)
    mean = {order: sum(times) / len(times) for order, times in found.items()}
    assert found["zigzag"][-1] <= last * found["stop-the-world"][-1]
    # Best effort does less on the target, and so hands over less.
    assert found["zigzag"][-1] <= 1.05 * min(times[-1] for times in found.values())
    assert mean["zigzag"] <= mean_part * mean["stop-the-world"]
    assert mean["zigzag"] == min(mean.values())


def test_an_instance_that_comes_late_gets_its_part_of_a_burst() -> None:
    """Where requests are bound early, those that came first keep them."""
    worst, served = {}, {}
    for binding in (EarlyBinding(), LateBinding()):
        result, _ = burst("stop-the-world", binding=binding)
        worst[binding] = first_token_ms(result)[-1]
        served[binding] = Counter(line.worker for line in result.requests)
    assert worst[LateBinding()] <= 0.67 * worst[EarlyBinding()]
    assert min(served[LateBinding()].values()) >= 10
    assert served[LateBinding()].total() == 40


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_handed_over_is_told_and_measured(tp_size: int, tmp_path: Path) -> None:
    _, record = burst("zigzag", tp_size=tp_size)
    said = events(record, tmp_path)
    duties = [s.duty for s in said if isinstance(s, StartHolding) and s.duty is not None]
    taken = [event for event in said if isinstance(event, BatchTaken)]
    assert any(duty.live_order is not None and duty.gives_to for duty in duties)
    assert any(isinstance(event, LiveStarted) for event in said)
    assert taken
    assert all(event.tokens == 2000 * len(event.requests) for event in taken)
    assert all(event.row_bytes == (event.next_layer > 0) * event.tokens * 8192 for event in taken)
    assert len({(r, attempt) for event in taken for r, attempt, _ in event.requests}) == sum(
        len(event.requests) for event in taken
    )
    reports = [event for event in said if isinstance(event, InstanceReported) and event.handovers]
    # Rows, and the KV of every layer that was run before.
    rows = sum(event.row_bytes for event in taken)
    kv_bytes = LLAMA_3_8B.kv_bytes_per_token // (LLAMA_3_8B.layers - 2)
    kv = sum(event.tokens * max(event.next_layer - 1, 0) * kv_bytes for event in taken)
    assert reports[-1].handovers == len(taken)
    assert reports[-1].handover_bytes == rows + kv
    layers = [event.live_layers for event in said if isinstance(event, LayerArrived)]
    assert max(layers) > 0


def test_one_token_needs_no_kv(tmp_path: Path) -> None:
    """The rows are enough for the first token, and there is no other."""
    result, record = burst("zigzag", output_tokens=1)
    said = events(record, tmp_path)
    taken = [event for event in said if isinstance(event, BatchTaken)]
    reports = [event for event in said if isinstance(event, InstanceReported) and event.handovers]
    assert taken
    assert reports[-1].handover_bytes == sum(event.row_bytes for event in taken)
    assert {line.outcome for line in result.requests} == {Outcome.FINISHED}


@pytest.mark.parametrize("seed", range(12))
def test_stretches_are_single_steps_with_live_instances_too(seed: int) -> None:
    rng = random.Random(f"live stretches {seed}")
    model = msgspec.structs.replace(make_model("m", 6, 16 * MIB), row_bytes_per_token=4096)
    config = make_config((ModelPolicy(model, 1, 4, 10_000, 256),), workers=4)
    controller = msgspec.structs.replace(
        config.controller, live_order=rng.choice(["zigzag", "best-effort"]), live_over_ns=0
    )
    devices = (make_device(1 << rng.choice([26, 28])),) * 4
    config = msgspec.structs.replace(
        config, controller=controller, devices=devices, report_gap_ns=rng.choice([20, 500]) * MS
    )
    times = sorted(3 * _S + rng.randrange(2000) * MS for _ in range(40))
    rows = [Row(at, rng.randint(1, 300), rng.randint(1, 100)) for at in times]
    found = []
    for coalesces in (False, True):
        file = io.BytesIO()
        one = msgspec.structs.replace(config, coalesces=coalesces)
        result = simulate(rows, one, seed, file)
        found.append((result.requests, result.end_ns, file.getvalue().partition(b"\n")[2]))
    assert b"LiveStarted" in found[0][2]
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_the_same_seed_gives_the_same_bytes_with_live_instances() -> None:
    records = []
    for hash_seed in ("0", "1"):
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        )
        records.append(child.stdout)
    assert records[0] == records[1]
    assert b"BatchTaken" in records[0]


class Ear:
    """A worker that writes down what it receives, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.received: list[tuple[int, PeerMessage]] = []
        self.lost: list[WorkerRef] = []

    def put(self, news: MemberInput) -> None:
        if isinstance(news, PeerSent):
            self.received.append((self.clock.now_ns, news.message))
        else:
            assert isinstance(news, PeerLost), news
            self.lost.append(news.peer)


class Late:
    """Messages are late, and every so many break their line for a while (0: none does)."""

    def __init__(self, rng: random.Random, clock: Clock, breaks_one_in: int = 0) -> None:
        self._rng, self._clock, self._one_in = rng, clock, breaks_one_in

    def of_worker_ns(self) -> int:
        return self._rng.randrange(MS)

    def line_loss_ns(self) -> int | None:
        if not self._one_in or self._rng.randrange(self._one_in):
            return None
        return self._clock.now_ns + self._rng.randrange(2 * MS)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5 * MIB)), min_size=1, max_size=20),
    delays=st.randoms(use_true_random=False),
    dies=st.none() | st.integers(0, 20),
)
def test_messages_come_in_order_and_no_faster_than_links(
    sizes: list[tuple[int, int]], delays: random.Random, dies: int | None
) -> None:
    clock, rate = Clock(), 1 << 30
    refs = [WorkerRef(number) for number in range(4)]
    topology = Topology(devices={ref: make_device(rate) for ref in refs})
    serving = Transfers(clock, topology, TransferTimes(1, 1)).moves.serving
    link = LiveLink(clock, serving, Late(delays, clock), lambda *_: None)
    ears = {ref: Ear(clock) for ref in refs}
    for ref, ear in ears.items():
        link.join(ref, ear.put)
    sender, key = refs[3], BatchKey(1, 1)
    for number, (receiver, size_bytes) in enumerate(sizes):
        kv = TellPeer(refs[receiver], KvLayer(key, number), size_bytes=size_bytes)
        link.send(sender, kv)
        link.send(refs[receiver], TellPeer(sender, Pull(key)))
    if dies is not None:
        clock.at(dies * MS, lambda: link.died(sender))
    while clock.run_next():
        pass
    totals = dict.fromkeys(range(3), 0)
    for number, (receiver, size_bytes) in enumerate(sizes):
        totals[receiver] += size_bytes
        came = [
            at for at, message in ears[refs[receiver]].received if message == KvLayer(key, number)
        ]
        assert len(came) == 1 or (dies is not None and not came)
        assert all(at * rate >= totals[receiver] * _S for at in came)
    if dies is None:
        assert clock.now_ns * rate >= sum(totals.values()) * _S, "the sender's uplink is shared"
    for ref in refs[:3]:
        numbers = [m.layer for _, m in ears[ref].received if isinstance(m, KvLayer)]
        assert numbers == sorted(numbers)
        talked = any(refs[receiver] == ref for receiver, _ in sizes)
        assert ears[ref].lost == ([sender] if talked and dies is not None else [])


@given(
    sends_ns=st.lists(st.integers(0, 20 * MS), min_size=1, max_size=40).map(sorted),
    delays=st.randoms(use_true_random=False),
    one_in=st.integers(1, 9),
)
def test_both_learn_that_a_line_broke_before_anything_comes_over_the_next_one(
    sends_ns: list[int], delays: random.Random, one_in: int
) -> None:
    """A message comes once or is lost, in order; both are told of as many breaks. What was sent
    before a worker learned of a break does not come behind that."""
    clock = Clock()
    one, other = WorkerRef(0), WorkerRef(1)
    topology = Topology(devices={ref: make_device(1 << 30) for ref in (one, other)})
    serving = Transfers(clock, topology, TransferTimes(1, 1)).moves.serving
    link = LiveLink(clock, serving, Late(delays, clock, one_in), lambda *_: None)
    told: list[tuple[WorkerRef, int | None]] = []
    sent_after: dict[int, int] = {}
    breaks = dict.fromkeys((one, other), 0)

    def put(me: WorkerRef, news: MemberInput) -> None:
        if isinstance(news, PeerLost):
            breaks[me] += 1
            told.append((me, None))
        else:
            assert isinstance(news, PeerSent)
            assert isinstance(news.message, KvLayer)
            assert sent_after[news.message.layer] == breaks[me], "sender and receiver agree"
            told.append((me, news.message.layer))

    def send(number: int) -> None:
        sender, receiver = (one, other) if number % 2 else (other, one)
        sent_after[number] = breaks[sender]
        link.send(sender, TellPeer(receiver, KvLayer(BatchKey(1, 1), number), size_bytes=1))

    for ref in (one, other):
        link.join(ref, partial(put, ref))
    for number, at_ns in enumerate(sends_ns):
        clock.at(at_ns, partial(send, number))
    while clock.run_next():
        pass
    assert breaks[one] == breaks[other]
    for ref in (one, other):
        numbers = [number for who, number in told if who == ref and number is not None]
        assert numbers == sorted(set(numbers))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5 * MIB)), max_size=20),
    delays=st.randoms(use_true_random=False),
    times_ms=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)),
)
def test_who_was_given_up_while_it_was_silent_learns_that_its_connections_were_closed(
    sizes: list[tuple[int, int]], delays: random.Random, times_ms: tuple[int, int, int]
) -> None:
    """It lives on, and is met again: what it left with others is known on both sides to be over."""
    clock = Clock()
    refs = [WorkerRef(number) for number in range(4)]
    topology = Topology(devices={ref: make_device(1 << 30) for ref in refs})
    serving = Transfers(clock, topology, TransferTimes(1, 1)).moves.serving
    link = LiveLink(clock, serving, Late(delays, clock), lambda *_: None)
    ears = {ref: Ear(clock) for ref in refs}
    for ref, ear in ears.items():
        link.join(ref, ear.put)
    silent = refs[3]
    for number, (receiver, size_bytes) in enumerate(sizes):
        kv = TellPeer(refs[receiver], KvLayer(BatchKey(1, 1), number), size_bytes=size_bytes)
        link.send(silent, kv)
    held_ms, given_up_ms, on_ms = itertools.accumulate(times_ms)
    clock.at(held_ms * MS, lambda: link.hold(silent))
    clock.at(given_up_ms * MS, lambda: link.leave(silent))
    clock.at(on_ms * MS, lambda: link.go_on(silent))
    clock.at((on_ms + 1) * MS, lambda: link.join(silent, ears[silent].put))
    late = TellPeer(refs[0], KvLayer(BatchKey(1, 1), len(sizes)))
    clock.at((on_ms + 2) * MS, lambda: link.send(silent, late))
    while clock.run_next():
        pass
    talked = {refs[receiver] for receiver, _ in sizes}
    assert sorted(ears[silent].lost) == sorted(talked)
    assert all(ears[ref].lost == ([silent] if ref in talked else []) for ref in refs[:3])
    assert all(at <= given_up_ms * MS for ear in ears.values() for at, _ in ear.received[:-1])
    assert ears[refs[0]].received[-1][1] == late.message


@given(delays=st.randoms(use_true_random=False), is_silent=st.booleans(), is_given_up=st.booleans())
def test_nothing_is_kept_of_workers_that_died(
    delays: random.Random, is_silent: bool, is_given_up: bool
) -> None:
    clock = Clock()
    worker, other = WorkerRef(0), WorkerRef(1)
    topology = Topology(devices={ref: make_device(1 << 30) for ref in (worker, other)})
    serving = Transfers(clock, topology, TransferTimes(1, 1)).moves.serving
    link = LiveLink(clock, serving, Late(delays, clock), lambda *_: None)
    ears = {ref: Ear(clock) for ref in (worker, other)}
    link.join(worker, ears[worker].put)
    link.join(other, ears[other].put)
    link.send(worker, TellPeer(other, Pull(BatchKey(1, 1))))
    if is_silent:
        link.hold(worker)
    if is_given_up:
        link.leave(worker)
    link.died(worker)
    link.send(worker, TellPeer(other, Pull(BatchKey(1, 2))))
    while clock.run_next():
        pass
    assert ears[other].lost == [worker]
    dead = ears.pop(worker)
    assert (dead.received, dead.lost) == ([], [])
    kept = weakref.ref(dead)
    del dead
    gc.collect()
    assert kept() is None
