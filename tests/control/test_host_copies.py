"""Copies in host memory: one per model, restored before the last device copy goes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    MS,
    REMAINDER,
    SPEC,
    H,
    W,
    arrived,
    copies_of,
    copy_order,
    drop,
    finished,
    host_joined,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    report,
    scaled,
    serves,
    step,
    whole,
)

from livescale.clusters.topology import Host
from livescale.control.controller import Controller
from livescale.control.policy.placement import Discard, HostRoom, Keep, ModelCopies, suggest
from livescale.messages.commands import AnyCommand, DropHolding, ModelGone
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    HoldingDropped,
    HoldingFailed,
    ModelAdded,
    ModelRemoved,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.values.chunks import senders
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.types import HoldingId, agent_ref

IDLE_NS = 500 * MS
KEPT = HoldingId(900, H[0])


def drops_of(commands: Sequence[AnyCommand]) -> list[DropHolding]:
    """Orders to agents."""
    drops = [command for command in commands if isinstance(command, DropHolding)]
    return [command for command in drops if command.holding.member.is_agent]


def has_copy(number: int, model: str = "m", memory_bytes: int = 1000) -> AnyEvent:
    held = report(copy_order(H[number], KEPT.plan, None, model))
    return host_joined(number, held, memory_bytes=memory_bytes)


def lazy(*names: str, **values: object) -> dict[str, object]:
    """Models that may go to zero instances."""
    models = tuple(make_policy(name, least=0, idle_ns=IDLE_NS, **values) for name in names)
    return {"models": models}


def test_every_model_gets_one_copy_and_they_are_spread() -> None:
    controller = make_controller(workers=0, agents_expected=2, **lazy("a", "b", "c", "d"))
    orders = copies_of(step(controller, 0, host_joined(0), host_joined(1)))
    assert [(order.model, order.holding.member, order.reason) for order in orders] == [
        ("a", H[0], "spread"),
        ("b", H[1], "spread"),
        ("c", H[0], "spread"),
        ("d", H[1], "spread"),
    ]
    assert {order.feeds for order in orders} == {whole(None)}, "nobody else has them"


def test_an_instance_starts_from_the_host_copy() -> None:
    controller = make_controller(workers=1, agents_expected=1, **lazy("m"))
    step(controller, 0, *joined(W[0]), has_copy(0))
    (order,) = loads_of(step(controller, 1, arrived("r")))
    assert order.feeds == whole(H[0])


def test_a_request_of_a_model_without_instances_starts_one_and_it_goes_when_idle() -> None:
    controller = make_controller(workers=1, agents_expected=1, **lazy("m"))
    assert step(controller, 0, *joined(W[0]), has_copy(0)) == []
    woken, *_ = step(controller, 1, arrived("r"))
    assert woken == scaled(0, 1, "token_rate")
    step(controller, 2, *loaded(HoldingId(1, W[0])))
    step(controller, 3, finished("r"))
    assert step(controller, 3 + IDLE_NS, Tick()) == [], "its tokens are still in the window"
    commands = step(controller, 1001 * MS, Tick())
    assert commands[0] == scaled(1, 0, "unused")
    assert commands[-1] == drop(1, W[0]), "the host copy is kept, so it may go at once"


def test_the_copy_is_restored_over_the_data_plane_before_the_last_device_copy_goes() -> None:
    controller = make_controller(workers=1, agents_expected=1, settle_ns=0, **lazy("m"))
    step(controller, 0, *serves(W[0], 101))
    step(controller, 1, Tick())
    drained = step(controller, 1 + IDLE_NS, Tick())
    assert drained[0] == scaled(1, 0, "unused")
    assert not any(isinstance(command, DropHolding) for command in drained)
    (order,) = copies_of(step(controller, 2 + IDLE_NS, host_joined(0)))
    assert (order.feeds, order.reason) == (
        whole(W[0]),
        "restored before the last device copy goes",
    )
    assert step(controller, 3 + IDLE_NS, *loaded(order.holding)[:-1]) == []
    last = step(controller, 4 + IDLE_NS, loaded(order.holding)[-1])
    assert last == [drop(101, W[0])]


def test_a_copy_is_reclaimed_only_for_lack_of_memory_and_while_a_device_holds_it() -> None:
    """Two models of 60 bytes on a host of 100: that of the one that is served gives way."""
    controller = make_controller(workers=1, agents_expected=1, **lazy("a", "b"))
    commands = step(controller, 0, *serves(W[0], 101, "a"), has_copy(0, "a", memory_bytes=100))
    assert drops_of(commands) == [DropHolding(KEPT, "reclaimed for b")]
    assert copies_of(commands) == [], "the memory is not free yet"
    assert step(controller, 1, Tick()) == []
    commands = step(controller, 2, HoldingDropped(KEPT))
    assert [order.model for order in copies_of(commands)] == ["b"]


def test_memory_that_comes_free_anyway_is_waited_for() -> None:
    controller = make_controller(workers=2, agents_expected=1, **lazy("a", "b", "c"))
    workers = [*serves(W[0], 101, "a"), *serves(W[1], 102, "b")]
    held = [report(copy_order(H[0], 901 + n, None, model)) for n, model in enumerate("ab")]
    commands = step(controller, 0, *workers, host_joined(0, *held, memory_bytes=130))
    assert [drop.holding.plan for drop in drops_of(commands)] == [901]
    assert step(controller, 1, Tick()) == [], "one is enough"


def test_copies_of_a_lost_host_are_made_again_elsewhere() -> None:
    controller = make_controller(workers=1, agents_expected=2, **lazy("m"))
    step(controller, 0, *serves(W[0], 101), has_copy(0), host_joined(1))
    (order,) = copies_of(step(controller, 1, WorkerLost(H[0], "power")))
    assert (order.holding.member, order.feeds) == (H[1], whole(W[0]))


def test_of_two_copies_the_whole_one_stays() -> None:
    controller = make_controller(workers=0, agents_expected=2, **lazy("m"))
    arriving = host_joined(0, report(copy_order(H[0], 900, H[1]), watermark=0))
    kept = host_joined(1, report(copy_order(H[1], 901, None)))
    commands = step(controller, 0, arriving, kept)
    assert commands == [DropHolding(KEPT, "one copy is enough")]


def test_half_a_copy_that_nobody_can_complete_is_dropped() -> None:
    spec = msgspec.structs.replace(SPEC, tp_size=2)
    controller = make_controller(workers=0, agents_expected=1, **lazy("m", spec=spec))
    commands = step(controller, 0, has_copy(0))
    assert drops_of(commands) == [DropHolding(KEPT, REMAINDER)]
    assert copies_of(commands) == []
    orders = copies_of(step(controller, 1, HoldingDropped(KEPT)))
    assert [order.rank for order in orders] == [0, 1]


def test_copies_and_instances_of_models_that_are_served_no_more_are_given_back() -> None:
    controller = make_controller(workers=1, agents_expected=1, **lazy("m"))
    commands = step(controller, 0, *serves(W[0], 101, "gone"), has_copy(0, "gone"))
    assert drops_of(commands) == [DropHolding(KEPT, REMAINDER)]
    assert drop(101, W[0], REMAINDER) in commands


def test_a_failed_copy_is_tried_again_after_its_time() -> None:
    controller = make_controller(workers=0, agents_expected=1, load_retry_ns=100, **lazy("m"))
    (order,) = copies_of(step(controller, 0, host_joined(0)))
    assert step(controller, 10, HoldingFailed(order.holding, "disk")) == []
    assert step(controller, 109, Tick()) == []
    assert len(copies_of(step(controller, 110, Tick()))) == 1


def test_an_added_model_gets_its_copy_first_then_instances() -> None:
    controller = make_controller(workers=2, agents_expected=1, **lazy("m"))
    step(controller, 0, *joined(W[0], W[1]), has_copy(0))
    added = ModelAdded(make_policy("new", least=1))
    commands = step(controller, 1, added)
    (order,) = copies_of(commands)
    (load,) = loads_of(commands)
    assert (order.model, order.feeds) == ("new", whole(None))
    assert load.feeds == whole(H[0]), "the instance follows the copy that is arriving"
    assert commands.index(order) < commands.index(load)


def test_a_removed_model_finishes_its_requests_and_goes_with_everything() -> None:
    controller = make_controller(workers=1, agents_expected=1, **lazy("m", "other"))
    step(controller, 0, *serves(W[0], 101), has_copy(0))
    step(controller, 1, arrived("r"))
    assert step(controller, 2, ModelRemoved("m")) == [], "a request runs"
    commands = step(controller, 3, finished("r"))
    assert [type(c).__name__ for c in commands] == ["ScaleDecided", "Drain", "DropHolding"]
    assert drops_of(step(controller, 4, HoldingDropped(HoldingId(101, W[0])))) == [
        DropHolding(KEPT, "withdrawn")
    ]
    assert ModelGone("m") in step(controller, 5, HoldingDropped(KEPT))
    assert list(controller.models) == ["other"]


def strategy_world(placement: Placement) -> Controller:
    """Two workers on host a, one on host b, agents on both; one model."""
    policy = make_policy("m", least=0, idle_ns=IDLE_NS)
    controller = make_controller(
        workers=3, agents_expected=2, models=(policy,), placement=placement, multicast="host"
    )
    devices = [msgspec.structs.replace(DEVICE, host=host) for host in ("a", "a", "b")]
    workers = [WorkerJoined(W[n], device) for n, device in enumerate(devices)]
    agents = [host_joined(0, host="a"), host_joined(1, host="b")]
    controller.step(0, [*workers, *agents])
    return controller


def test_a_cache_keeps_what_its_host_loaded_for_its_time() -> None:
    """ServerlessLLM: a miss reads storage once and fills the cache, which forgets in time."""
    controller = strategy_world(CacheCopies(ttl_ns=10_000 * MS))
    commands = step(controller, 1, arrived("r"))
    (copy,), (load,) = copies_of(commands), loads_of(commands)
    assert (copy.holding.member, copy.reason, load.holding.member) == (H[0], "cache miss", W[0])
    assert (copy.feeds, load.feeds) == (whole(W[0]), whole(None))
    step(controller, 2, *loaded(load.holding), *loaded(copy.holding))
    # A second instance is placed where the cache is warm, and reads it.
    (second,) = loads_of(step(controller, 3, arrived("s", 1000)))
    assert (second.holding.member, second.feeds) == (W[1], whole(H[0]))
    step(controller, 4, *loaded(second.holding), finished("r"), finished("s"))
    due_ns = 10_000 * MS + 3
    assert drops_of(step(controller, due_ns - 1, Tick())) == []
    assert [d.reason for d in drops_of(step(controller, due_ns, Tick()))] == [
        "not used for its time to live"
    ]


@pytest.mark.parametrize("cached", [None, 0, 1])
def test_a_cache_serves_workers_of_its_host_and_others_read_the_files(cached: int | None) -> None:
    """Worker and agent 0 are on a host without the files."""
    controller = make_controller(
        2, placement=CacheCopies(), multicast="host", agents_expected=2, models=(make_policy(),)
    )
    held = [report(copy_order(H[cached], 50, None))] if cached is not None else []
    for number in range(2):
        host = Host(f"h{number}", "leaf", 1000, reads_files=bool(number))
        kept = tuple(held) if number == cached else ()
        step(controller, number, AgentJoined(H[number], host, kept))
    devices = [
        msgspec.structs.replace(DEVICE, host=f"h{number}", reads_files=bool(number))
        for number in range(2)
    ]
    joins = [WorkerJoined(W[number], device) for number, device in enumerate(devices)]
    (order,) = loads_of(step(controller, 2, *joins))
    assert order.holding.member == W[1 if cached is None else cached]
    assert order.feeds == whole(None if cached is None else H[cached])


def test_everywhere_is_every_host_with_room_and_none_is_none() -> None:
    controller = make_controller(
        workers=0, agents_expected=2, placement=AllCopies(), **lazy("a", "b")
    )
    orders = copies_of(step(controller, 0, host_joined(0), host_joined(1, memory_bytes=70)))
    # One of each before the second of any.
    assert [(o.model, o.holding.member) for o in orders] == [("a", H[0]), ("b", H[0]), ("a", H[1])]
    controller = make_controller(
        workers=1, agents_expected=1, placement=NoCopies(), multicast="storage", **lazy("a")
    )
    assert step(controller, 0, *joined(W[0]), host_joined(0)) == []


# -- strategies as functions ----------------------------------------------------------------------

sizes = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(
    models=st.lists(
        st.tuples(st.integers(1, 60), st.booleans(), st.booleans(), st.sets(st.integers(0, 2))),
        max_size=8,
    ),
    rooms=st.lists(st.integers(0, 120), min_size=3, max_size=3),
)
def test_what_is_spread_fits_is_single_and_takes_nothing_that_is_needed(
    models: list[tuple[int, bool, bool, set[int]]], rooms: list[int]
) -> None:
    views = [
        ModelCopies(
            f"m{n}", size, on_devices, on_devices and goes, False, tuple(map(agent_ref, sorted(at)))
        )
        for n, (size, on_devices, goes, at) in enumerate(models)
    ]
    free = {agent_ref(n): size for n, size in enumerate(rooms)}
    found = suggest(SpreadCopies(), 0, views, [HostRoom(a, size) for a, size in free.items()])
    named = {view.model: view for view in views}
    kept = [s for s in found if isinstance(s, Keep)]
    assert len({s.model for s in kept}) == len(kept), "one copy per model"
    for s in kept:
        assert not named[s.model].agents, "only what has no copy gets one"
        free[s.agent] -= named[s.model].size_bytes
    assert all(size >= 0 for size in free.values()), "copies fit"
    gone = [s for s in found if isinstance(s, Discard)]
    for s in gone:
        view = named[s.model]
        is_extra = s.agent in view.agents[1:]
        assert is_extra or (view.is_on_devices and not view.needs_copy), s


@given(sizes, st.integers(1, 5))
def test_spread_copies_even_out_the_bytes(sizes: list[int], hosts: int) -> None:
    """No host has more than another by more than one model's size."""
    views = [ModelCopies(f"m{n}", size, False, False, False, ()) for n, size in enumerate(sizes)]
    rooms = [HostRoom(agent_ref(n), 1000) for n in range(hosts)]
    found = suggest(SpreadCopies(), 0, views, rooms)
    assert len(found) == len(sizes)
    used = [1000 - room.free_bytes for room in rooms]
    assert max(used) - min(used) <= max(sizes)


def test_ranks_that_leave_a_host_by_one_nic_are_like_readers() -> None:
    """The instance on devices is read already, and still it is the better source."""
    spec = msgspec.structs.replace(SPEC, name="pair", tp_size=2)
    pair = (W[0], W[1])
    held = [
        report(load_order(7, worker, 1, None, "pair", rank=rank, workers=pair))
        for rank, worker in enumerate(pair)
    ]
    copy = [report(copy_order(H[0], 900 + rank, None, "pair", rank)) for rank in (0, 1)]
    models = (make_policy("pair", 1, 3, spec=spec),)
    controller = make_controller(6, models=models, agents_expected=1)
    there = [WorkerJoined(worker, DEVICE, (one,)) for worker, one in zip(pair, held, strict=True)]
    step(controller, 0, host_joined(0, *copy), *there, *joined(*W[2:6]))
    first = loads_of(step(controller, 1, arrived("r", 1000, "pair")))
    second = loads_of(step(controller, 2, arrived("s", 3000, "pair")))
    assert (len(first), len(second)) == (2, 2)
    used = [up.worker for order in (*first, *second) for up in senders(order.feeds)]
    assert not any(sender.is_agent for sender in used), used
