"""Members that leave in order: replaced first, drained, and let go when nothing is lost."""

from __future__ import annotations

import msgspec
from stories import (
    DEVICE,
    H,
    W,
    arrived,
    finished,
    joined,
    loaded,
    loads_of,
    make_controller,
    step,
    whole,
)
from test_host_copies import copies_of, lazy

from livescale.clusters.topology import Host
from livescale.control.controller import Controller
from livescale.messages.commands import Drain, Resume
from livescale.messages.events import (
    AgentJoined,
    HoldingCompleted,
    HoldingDropped,
    MembersLeave,
    WorkerJoined,
)

ELSEWHERE = msgspec.structs.replace(DEVICE, reads_files=False)


def host(number: int, *, reads_files: bool) -> AgentJoined:
    return AgentJoined(H[number], Host(f"host-{number}", "leaf", 1000, reads_files=reads_files))


def remote(*workers: int) -> list[WorkerJoined]:
    """Workers on machines that have none of the files."""
    return [WorkerJoined(W[number], ELSEWHERE) for number in workers]


def test_an_instance_that_leaves_is_replaced_and_its_worker_goes_then() -> None:
    controller = make_controller(workers=2)
    (order,) = loads_of(step(controller, 0, *joined(W[0], W[1])))
    leaver = order.holding.member
    step(controller, 1, *loaded(order.holding))
    commands = step(controller, 2, MembersLeave((leaver,)))
    assert [c for c in commands if isinstance(c, Drain)]
    (again,) = loads_of(commands)
    assert again.holding.member != leaver
    assert controller.status().free == ()
    dropped = step(controller, 3, *loaded(again.holding))
    assert dropped
    step(controller, 4, HoldingDropped(order.holding))
    assert controller.status().free == (leaver,)


def test_what_leaves_takes_its_requests_to_the_end_and_gets_no_others() -> None:
    controller = make_controller(workers=2)
    (order,) = loads_of(step(controller, 0, *joined(W[0], W[1])))
    leaver = order.holding.member
    step(controller, 1, *loaded(order.holding), arrived("r"))
    (again,) = loads_of(step(controller, 2, MembersLeave((leaver,)), MembersLeave((leaver,))))
    commands = step(controller, 3, *loaded(again.holding), arrived("s"))
    assert not [c for c in commands if isinstance(c, Resume)]
    assert controller.status().free == ()
    assert controller.router.on_worker(again.holding.member)
    step(controller, 4, finished("r"))
    step(controller, 5, HoldingDropped(order.holding))
    assert controller.status().free == (leaver,)


def test_the_last_copy_in_host_memory_moves_before_its_host_goes() -> None:
    controller = make_controller(workers=0, agents_expected=2, **lazy("m"))
    (order,) = copies_of(step(controller, 0, host(0, reads_files=True), host(1, reads_files=False)))
    leaver = order.holding.member
    assert leaver == H[0], "the other one has no files"
    step(controller, 1, HoldingCompleted(order.holding, 60))
    (again,) = copies_of(step(controller, 2, MembersLeave((leaver,))))
    assert again.holding.member == H[1]
    assert controller.status().free == ()
    step(controller, 3, HoldingCompleted(again.holding, 60))
    assert controller.status().free == (leaver,)


def test_hosts_without_files_load_only_what_is_in_memory() -> None:
    controller = make_controller(workers=2)
    assert loads_of(step(controller, 0, *remote(0, 1))) == []
    commands = step(controller, 1, host(0, reads_files=False), host(1, reads_files=True))
    assert [order.holding.member for order in copies_of(commands)] == [H[1]]
    (order,) = loads_of(commands)
    assert order.feeds == whole(H[1]), "behind the copy that arrives"


def test_who_is_not_there_does_not_leave() -> None:
    controller: Controller = make_controller(workers=1)
    step(controller, 0, MembersLeave((W[3],)))
    assert controller.stale_events == 1
    assert controller.status().free == ()
