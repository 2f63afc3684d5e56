"""The policy that aims at a time to the first token, through the Controller."""

from __future__ import annotations

import msgspec
from stories import (
    DEVICE,
    MS,
    W,
    adopted,
    arrived,
    finished,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    rejoined,
    report,
    reported,
)

from livescale.control.controller import Controller
from livescale.messages.commands import Drain, Resume, ScaleDecided
from livescale.messages.events import AnyEvent, InstanceReported, WorkerJoined
from livescale.values.scaling_policies import SloAim

S = 1_000 * MS
AIM = SloAim(ttft_ns=400 * MS, floor_decay_ns=4 * S, scale_down_timeout_ns=100 * MS)


def begin(workers: int, instances: int = 1, least: int = 1) -> Controller:
    """Instances that serve on the first workers; 1000 tokens per second are configured."""
    model = make_policy(least=least, scaling=AIM)
    controller = make_controller(workers, models=(model,))
    controller.step(0, [*adopted(instances), *joined(*W[instances:workers])])
    return controller


def computed(instance: int, tokens: int, run_ns: int, queued: int = 0) -> InstanceReported:
    news = reported(instance, running=1, queued=queued)
    return msgspec.structs.replace(news, prefill_tokens=tokens, prefill_ns=run_ns)


def decision(controller: Controller, now_ns: int, *events: AnyEvent) -> ScaleDecided | None:
    """What is decided about the number of instances."""
    commands = controller.step(now_ns, events)
    controller.validate()
    return next((c for c in commands if isinstance(c, ScaleDecided)), None)


def burst(count: int, prompt_tokens: int = 100) -> list[AnyEvent]:
    return [arrived(f"r{number}", prompt_tokens) for number in range(count)]


def test_a_burst_gets_its_instances_at_once_and_the_values_tell_why() -> None:
    """600 tokens at 1000 a second: 0.6 s on one instance; three compute them in 0.2 s."""
    found = decision(begin(8), 0, *burst(6))
    assert found is not None
    assert (found.from_instances, found.to_instances, found.reason) == (1, 3, "ttft_aim")
    assert {
        "ttft_aim_ms": 400,
        "service_tokens_per_s": 1000,
        "queued_prefill_tokens": 600,
        "serving": 1,
        "floor": 3,
        "at_least": 3,
    }.items() <= found.values.items()


def test_the_measured_rate_wins_over_the_configured_one() -> None:
    """Runs that took a second for 500 tokens."""
    controller = begin(8)
    controller.step(0, [computed(101, 500, S)])
    found = decision(controller, MS, *burst(6))
    assert found is not None
    assert (found.to_instances, found.values["service_tokens_per_s"]) == (6, 500)


def test_a_load_that_took_long_is_not_asked_for_for_a_queue_that_ends_before() -> None:
    """60 bytes at 600 a second were expected to take 0.1 s, and took 3 s."""
    device = msgspec.structs.replace(DEVICE, uplink_bytes_per_s=600, downlink_bytes_per_s=600)
    controller = make_controller(8, models=(make_policy(scaling=AIM),))
    held = report(load_order(101, W[0], 101, None))
    others = [WorkerJoined(worker, device) for worker in W[1:]]
    controller.step(0, [rejoined(held, device), reported(101), *others])
    commands = controller.step(0, burst(6))
    first = next(c for c in commands if isinstance(c, ScaleDecided))
    assert (first.to_instances, first.values["load_ms"]) == (3, 100)
    for order in loads_of(commands):
        controller.step(3 * S, loaded(order.holding))
    # Three instances compute 1,600 tokens, and as many that arrive in each second, within 3 s.
    late = [arrived(f"late{number}", 100) for number in range(16)]
    assert decision(controller, 4 * S, reported(101), *late) is None


def test_the_floor_holds_instances_and_then_lets_them_go() -> None:
    """One at a time, to the least number."""
    controller = begin(8, instances=2, least=1)
    orders = loads_of(controller.step(0, burst(8)))
    assert len(orders) == 2
    for order in orders:
        controller.step(10 * MS, loaded(order.holding))
    numbers = []
    ended: list[AnyEvent] = [finished(f"r{n}") for n in range(8)]
    events: list[AnyEvent] = [*ended, *(reported(101 + n) for n in range(2))]
    now_ns = 20 * MS
    while now_ns < 8 * S:
        commands = controller.step(now_ns, events)
        assert not any(isinstance(c, Resume) for c in commands)
        numbers += [now_ns] * sum(isinstance(c, Drain) for c in commands)
        events, now_ns = [], now_ns + 50 * MS
    assert len(numbers) == 3
    # The peak was four: a quarter of four seconds for each.
    for drained_ns, due_ns in zip(numbers, (S, 2 * S, 3 * S), strict=True):
        assert due_ns <= drained_ns <= due_ns + 400 * MS
