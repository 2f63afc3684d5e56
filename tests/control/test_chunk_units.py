"""The unit of transfers: what fits the slowest NIC of those who are there, but one unit for all
that is on its way of a model.
"""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    H,
    W,
    adopted,
    arrived,
    load_order,
    loaded,
    loads_of,
    make_controller,
    rejoined,
    report,
    step,
)

from livescale.clusters.topology import Host
from livescale.control.controller import Controller
from livescale.messages.commands import AmendHolding, AnyCommand
from livescale.messages.events import AgentJoined, WorkerJoined, WorkerLost
from livescale.values.chunks import fitting_chunk_bytes
from livescale.values.types import FromStorage, FromWorker, WorkerRef

UNIT = 1 << 20
SLOW = msgspec.structs.replace(DEVICE, interface_bytes_per_s=25_000_000)
SMALL = fitting_chunk_bytes(UNIT, [SLOW.interface_bytes_per_s])


def controller_of(workers: int) -> Controller:
    """Instance 101 serves on w0, and each burst wants one more."""
    controller = make_controller(workers, chunk_bytes=UNIT)
    step(controller, 0, *adopted(1))
    return controller


def burst(controller: Controller, number: int) -> list[AnyCommand]:
    return step(controller, number, *(arrived(f"r{number}.{n}", 10_000) for n in range(20)))


def units(commands: list[AnyCommand]) -> dict[WorkerRef, int]:
    return {order.holding.member: order.chunk_bytes for order in loads_of(commands)}


def test_a_slow_link_that_joins_makes_chunks_small_and_takes_that_with_it() -> None:
    assert SMALL < UNIT
    controller = controller_of(1)
    step(controller, 0, WorkerJoined(W[1], SLOW))
    assert units(burst(controller, 1)) == {W[1]: SMALL}
    controller = controller_of(1)
    step(
        controller,
        0,
        WorkerJoined(W[1], SLOW),
        WorkerLost(W[1], "gone"),
        WorkerJoined(W[2], DEVICE),
    )
    assert units(burst(controller, 1)) == {W[2]: UNIT}


def test_what_is_on_its_way_keeps_its_unit_and_so_does_what_comes_beside_it() -> None:
    controller = controller_of(1)
    step(controller, 0, WorkerJoined(W[1], DEVICE))
    (first,) = loads_of(burst(controller, 1))
    assert first.chunk_bytes == UNIT
    # More are wanted: who joins gets the model at once.
    second = step(controller, 2, WorkerJoined(W[2], SLOW))
    assert units(second) == {W[2]: UNIT}
    step(controller, 3, *loaded(first.holding))
    step(controller, 4, *(e for order in loads_of(second) for e in loaded(order.holding)))
    assert units(step(controller, 5, WorkerJoined(W[3], DEVICE))) == {W[3]: SMALL}


def test_nothing_reads_from_what_arrives_in_another_unit() -> None:
    """Another controller ordered two loads, before and after it knew a slow link."""
    controller = make_controller(4, chunk_bytes=UNIT)
    orders = {
        W[n]: msgspec.structs.replace(load_order(110 + n, W[n], 110 + n, W[0]), chunk_bytes=unit)
        for n, unit in ((1, UNIT), (2, SMALL))
    }
    step(controller, 0, *adopted(1), *(rejoined(report(order, 1)) for order in orders.values()))
    step(controller, 1, WorkerJoined(W[3], DEVICE))
    (order,) = loads_of(burst(controller, 2))
    assert order.chunk_bytes == SMALL
    assert {feed.upstream for feed in order.feeds} <= {FromWorker(W[0]), FromWorker(W[2])}
    # Nor is it asked when a sender is lost.
    commands = step(controller, 3, WorkerLost(W[0], "gone"))
    amended = {c.holding.member: c.feeds for c in commands if isinstance(c, AmendHolding)}
    assert [feed.upstream for feed in amended[W[1]]] == [FromStorage()]
    assert FromWorker(W[1]) not in {feed.upstream for feed in amended[W[2]]}


@given(rates=st.lists(st.none() | st.integers(1 << 20, 1 << 34), min_size=1, max_size=6))
def test_the_unit_fits_all_who_are_there(rates: list[int | None]) -> None:
    controller = make_controller(1, chunk_bytes=UNIT)
    cluster = controller.planning.cluster
    for number, rate in enumerate(rates):
        host = Host(f"h{number}", "leaf", 1000, interface_bytes_per_s=rate)
        cluster.agent_joined(H[0], host)
        cluster.worker_joined(WorkerRef(number), SLOW)
        cluster.member_left(WorkerRef(number))
        assert cluster.chunk_bytes == fitting_chunk_bytes(UNIT, [rate])
    cluster.member_left(H[0])
    assert cluster.chunk_bytes == UNIT
    step(controller, 0, AgentJoined(H[1], Host("h", "leaf", 1000, 1 << 20)))
    assert cluster.chunk_bytes == fitting_chunk_bytes(UNIT, [1 << 20])
