"""To whom a draining instance is told to pass its requests, and when it is told again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from stories import (
    DEVICE,
    MS,
    W,
    arrived,
    load_order,
    make_controller,
    rejoined,
    report,
    reported,
    serves,
    step,
)

from livescale.clusters.topology import Device
from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, ChangeDuty, Drain, Resume
from livescale.messages.events import InstanceReported, Tick, WorkerLost
from livescale.values.routes import Duty, Partner, Taker
from livescale.values.types import HoldingId, InstanceId


def takers(commands: Sequence[AnyCommand]) -> list[tuple[InstanceId, list[InstanceId]]]:
    """Who is told what."""
    changed = [command.duty for command in commands if isinstance(command, ChangeDuty)]
    return [(d.instance, [t.partner.instance for t in d.drains_to]) for d in changed]


def busy(number: int) -> InstanceReported:
    """One request is running there, and needs no more than one instance."""
    return msgspec.structs.replace(reported(number, 1), started=((f"r{number}", 1),))


def draining(
    instances: int, device: Device = DEVICE, **config: object
) -> tuple[Controller, list[AnyCommand]]:
    """All have a request of their own; then the load is over, and the last one is drained."""
    controller = make_controller(instances, **{"drain": "move", **config})
    for n in range(instances):
        held = report(load_order(101 + n, W[n], 101 + n, None))
        step(controller, 0, rejoined(held, device), reported(101 + n))
    numbers = range(101, 101 + instances)
    step(controller, 1, *(arrived(f"r{number}") for number in numbers))
    step(controller, 2, *(busy(number) for number in numbers))
    commands: list[AnyCommand] = []
    for after in range(1, 40):
        commands = step(controller, after * 100 * MS, Tick())
        if any(isinstance(command, Drain) for command in commands):
            break
    return controller, commands


def drained(commands: Sequence[AnyCommand]) -> InstanceId:
    (number,) = [command.instance for command in commands if isinstance(command, Drain)]
    return number


def test_requests_may_move_to_those_that_serve() -> None:
    _, commands = draining(3)
    (told,) = takers(commands)
    assert told[0] == drained(commands)
    assert sorted([told[0], *told[1]]) == [101, 102, 103]


def test_without_the_setting_nobody_is_told() -> None:
    _, commands = draining(3, drain="finish")
    assert drained(commands)
    assert takers(commands) == []


def test_it_is_told_again_when_a_taker_is_gone() -> None:
    controller, commands = draining(3)
    ((number, first),) = takers(commands)
    lost = W[first[0] - 101]
    commands = step(controller, 5000 * MS, WorkerLost(lost, "x"))
    changed = dict(takers(commands))
    assert changed.get(number, []) == first[1:]


def test_who_is_wanted_again_keeps_its_requests() -> None:
    controller, commands = draining(2)
    ((number, _),) = takers(commands)
    commands = step(controller, 5000 * MS, *(arrived(f"s{n}", 400) for n in range(5)))
    assert Resume(number) in commands
    assert takers(commands) == [(number, [])]


def test_kv_takes_what_the_slowest_link_takes() -> None:
    device = msgspec.structs.replace(DEVICE, uplink_bytes_per_s=1000, downlink_bytes_per_s=4000)
    _, commands = draining(2, device=device)
    (changed,) = [command.duty for command in commands if isinstance(command, ChangeDuty)]
    # One byte per token.
    assert [taker.kv_token_ps for taker in changed.drains_to] == [10**9]


def test_a_restarted_controller_takes_the_order_back() -> None:
    """It takes an instance that has an order for one that serves."""
    order = load_order(101, W[0], 101, None)
    duty = Duty(101, (W[0],), drains_to=(Taker(Partner(102, W[1])),))
    controller = make_controller(2, drain="move")
    held = report(msgspec.structs.replace(order, duty=duty))
    commands = step(controller, 0, rejoined(held), reported(101, 1), *serves(W[1], 102))
    assert commands[-1] == ChangeDuty(HoldingId(101, W[0]), Duty(101, (W[0],)))
    assert takers(step(controller, 1, Tick())) == []
