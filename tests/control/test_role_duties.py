"""Prefill and decode on their own instances: duties, routes, mutation, and what is done without."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from stories import (
    DEVICE,
    MS,
    SPEC,
    W,
    adopted,
    arrived,
    joined,
    load_order,
    loads_of,
    make_controller,
    make_policy,
    plans_of,
    rejoined,
    report,
    reported,
    step,
)

from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, ChangeDuty, Dispatch, Drain, DropHolding
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    HoldingDropped,
    MembersLeave,
    ModelChanged,
    RequestEnded,
    WorkerJoined,
    WorkerLost,
)
from livescale.messages.scale_plan import FromWorker
from livescale.values.routes import Does
from livescale.values.scaling_policies import ModelPolicy, Period, RoleLimits
from livescale.values.types import LayerSpan, Outcome, Part, Role, WorkerRef

SPAN = LayerSpan(0, SPEC.layers)
PREFILL, DECODE = (Part("m", SPAN, role) for role in (Role.PREFILL, Role.DECODE))
RATE = 1_000_000


def policy(least: Sequence[int] = (1, 1), most: int = 8) -> ModelPolicy:
    roles = tuple(
        RoleLimits(role, instances_min, most)
        for role, instances_min in zip((Role.PREFILL, Role.DECODE), least, strict=True)
    )
    return make_policy(least=sum(least), most=2 * most, roles=roles)


def controller_of(
    instances: Sequence[Role], workers: int, least: Sequence[int] = (1, 1), **config: object
) -> Controller:
    """Instances 101, 102, … with these roles serve on w0, w1, …; the other workers are spare."""
    controller = make_controller(workers, models=(policy(least),), **config)
    events = [e for n, role in enumerate(instances) for e in serves(n, role)]
    step(controller, 0, *events, *joined(*W[len(instances) : workers]))
    return controller


def serves(number: int, role: Role) -> list[AnyEvent]:
    """A worker joins with an instance of an earlier controller's life."""
    order = load_order(101 + number, WorkerRef(number), 101 + number, None)
    assert order.duty is not None
    order = msgspec.structs.replace(order, duty=msgspec.structs.replace(order.duty, role=role))
    return [rejoined(report(order), nic(DEVICE)), reported(101 + number)]


def nic(device: object) -> object:
    return msgspec.structs.replace(device, uplink_bytes_per_s=RATE, downlink_bytes_per_s=RATE)


def duties(commands: Sequence[AnyCommand]) -> dict[int, tuple[Role, tuple[int, ...]]]:
    """By instance, its role and to which ones it gives what decodes."""
    found = [c.duty for c in commands if isinstance(c, ChangeDuty)]
    return {d.instance: (d.role, tuple(p.instance for p in d.decodes_at)) for d in found}


def drops_of(commands: Sequence[AnyCommand]) -> list[DropHolding]:
    return [command for command in commands if isinstance(command, DropHolding)]


def dispatched(commands: Sequence[AnyCommand]) -> list[int]:
    return [command.instance for command in commands if isinstance(command, Dispatch)]


def taken(request: str, by: int) -> BatchTaken:
    """The instance on worker `by` has taken the request over, which decodes."""
    requests = ((request, 1, 1),)
    return BatchTaken(101 + by, W[by], 0, requests, next_layer=0, tokens=1, row_bytes=0, pull_ns=0)


# -- duties and routes --------------------------------------------------------------------------


def test_prefill_instances_give_to_all_decode_instances() -> None:
    controller = make_controller(4, models=(policy(),))
    events = [
        *serves(0, Role.PREFILL),
        *serves(1, Role.PREFILL),
        *serves(2, Role.DECODE),
        *serves(3, Role.DECODE),
    ]
    told = duties(step(controller, 0, *events))
    assert told == {101: (Role.PREFILL, (103, 104)), 102: (Role.PREFILL, (103, 104))}
    state = controller.models["m"].entry
    routes = controller.roles.routes(0, state)
    assert [route.first.instance for route in routes] == [101, 102]
    for route in routes:
        first, then = route.hops
        assert (first.span, first.does, then.span, then.does) == (
            SPAN,
            Does.PREFILL,
            SPAN,
            Does.DECODE,
        )
        assert [partner.instance for partner in then.partners] == [103, 104]
        assert route.workers == (route.first.worker,), "only who computes prompts counts"
    # The order of an earlier life is known now: nothing is told twice.
    assert duties(step(controller, 1)) == {}


def test_a_prefill_instance_gives_to_the_sixteen_with_most_room() -> None:
    """Each offer goes to all of them. Those that it knows stay, and where one is lost the next one
    takes its place."""
    limits = (RoleLimits(Role.PREFILL, 1, 1), RoleLimits(Role.DECODE, 18, 18))
    controller = make_controller(19, models=(make_policy(least=19, most=19, roles=limits),))
    events = [e for n in range(19) for e in serves(n, Role.DECODE if n else Role.PREFILL)]
    full, fuller = (
        msgspec.structs.replace(reported(number), kv_blocks_used=used)
        for number, used in ((103, 20), (104, 30))
    )
    told = duties(step(controller, 0, *events, full, fuller))
    emptiest = [102, *range(105, 120)]
    assert told == {101: (Role.PREFILL, tuple(emptiest))}
    fullest = msgspec.structs.replace(reported(102), kv_blocks_used=90)
    assert duties(step(controller, 1, fullest)) == {}, "those that it knows stay"
    told = duties(step(controller, 2, WorkerLost(WorkerRef(10), "it died")))
    assert told == {101: (Role.PREFILL, (*(n for n in emptiest if n != 111), 103))}


def test_an_instance_of_several_ranks_drains_without_its_first_worker() -> None:
    """It still has partners to decode at, and no way to them: plans are made all the same."""
    model = msgspec.structs.replace(policy(), spec=msgspec.structs.replace(SPEC, tp_size=2))
    controller = make_controller(4, models=(model,))
    events: list[AnyEvent] = []
    for instance, role, pair in ((101, Role.PREFILL, W[:2]), (102, Role.DECODE, W[2:4])):
        for rank, worker in enumerate(pair):
            order = load_order(instance, worker, instance, None, rank=rank, workers=tuple(pair))
            assert order.duty is not None
            duty = msgspec.structs.replace(order.duty, role=role)
            held = report(msgspec.structs.replace(order, duty=duty))
            events.append(rejoined(held, nic(DEVICE)))
    told = duties(step(controller, 0, *events, reported(101), reported(102)))
    assert told == {101: (Role.PREFILL, (102,))}
    dropped = drops_of(step(controller, 1, MembersLeave(tuple(W[:2]))))
    assert [order.holding.member for order in dropped] == W[:2]
    step(controller, 2, HoldingDropped(dropped[0].holding), WorkerLost(W[0], "left"))
    (plan,) = plans_of(step(controller, 3, *joined(*W[4:6])))
    assert plan.instances == ((W[4], W[5]),)


def test_requests_come_to_prefill_and_count_where_they_decode() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE], 2)
    assert dispatched(step(controller, 1, arrived("a"))) == [101]
    assert controller.router.unfinished(PREFILL) == 1
    step(controller, 2, taken("a", by=1))
    assert (controller.router.unfinished(PREFILL), controller.router.unfinished(DECODE)) == (0, 1)
    assert [record.id for record in controller.router.on_worker(W[1])] == ["a"]
    step(controller, 3, RequestEnded("a", 1, Outcome.FINISHED, 5, W[1]))
    assert not controller.router.requests


def test_a_request_whose_decode_instance_is_lost_comes_to_prefill_again() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE, Role.DECODE], 3)
    step(controller, 1, arrived("a"))
    step(controller, 2, taken("a", by=1))
    commands = step(controller, 3, WorkerLost(W[1], "it died"))
    assert dispatched(commands) == [101]
    assert duties(commands) == {101: (Role.PREFILL, (103,))}
    assert (controller.router.unfinished(PREFILL), controller.router.unfinished(DECODE)) == (1, 0)


def test_what_a_lost_instance_had_taken_over_and_finished_is_over() -> None:
    """Its worker's next life has joined when the reports come."""
    controller = controller_of([Role.PREFILL, Role.DECODE], 2)
    step(controller, 1, arrived("a"))
    again = WorkerJoined(WorkerRef(1, 1), nic(DEVICE))
    ended = RequestEnded("a", 1, Outcome.FINISHED, 5, W[1])
    assert dispatched(step(controller, 2, again, taken("a", by=1), ended)) == []
    assert not controller.router.requests


def test_without_decode_instances_prefill_does_both() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE], 2)
    commands = step(controller, 1, WorkerLost(W[1], "it died"))
    assert duties(commands) == {101: (Role.PREFILL, ())}
    assert dispatched(step(controller, 2, arrived("a"))) == [101]


def test_without_prefill_instances_decode_does_both() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE], 2)
    step(controller, 1, arrived("a"))
    commands = step(controller, 2, WorkerLost(W[0], "it died"))
    assert dispatched(commands) == [102]
    assert controller.router.unfinished(PREFILL) == 1


def test_instances_of_a_life_without_roles_get_some() -> None:
    """They were unified: the model's first part takes them, and one of them becomes the other."""
    controller = make_controller(2, models=(policy(),))
    told = duties(step(controller, 0, *adopted(2)))
    assert told == {101: (Role.PREFILL, (102,)), 102: (Role.DECODE, ())}


def test_instances_of_a_life_with_roles_lose_them() -> None:
    controller = make_controller(2)
    told = duties(step(controller, 0, *serves(0, Role.PREFILL), *serves(1, Role.DECODE)))
    assert told == {101: (Role.UNIFIED, ()), 102: (Role.UNIFIED, ())}


def test_from_nothing_both_roles_are_loaded() -> None:
    controller = make_controller(4, models=(policy(),))
    orders = loads_of(step(controller, 0, *joined(*W[:4])))
    assert sorted(o.duty.role for o in orders if o.duty is not None) == ["decode", "prefill"]


def test_both_go_to_zero_together() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE], 2, least=(0, 0))
    state = controller.models["m"]
    step(controller, MS, arrived("a"))
    step(controller, 2 * MS, taken("a", by=1))
    later_ns = 100 * state.policy.idle_ns
    step(controller, later_ns)
    kept = [controller.fleet.tally(part).capacity for part in (PREFILL, DECODE)]
    assert kept == [1, 1], "as long as one request is there"
    step(controller, later_ns, RequestEnded("a", 1, Outcome.FINISHED, 5, W[1]))
    for n in range(4):
        step(controller, later_ns + n * state.policy.idle_ns)
    assert [controller.fleet.tally(part).capacity for part in (PREFILL, DECODE)] == [0, 0]


# -- mutation -----------------------------------------------------------------------------------


def busy_decode(instance: int, blocks: int) -> AnyEvent:
    return msgspec.structs.replace(reported(instance, running=4), kv_blocks_used=blocks)


def test_decode_grows_by_mutation_and_prefill_is_loaded_in_its_place() -> None:
    controller = controller_of([Role.PREFILL, Role.PREFILL, Role.DECODE], 5, least=(2, 1))
    commands = step(controller, MS, busy_decode(103, 99))
    told = duties(commands)
    (order,) = loads_of(commands)
    assert order.duty is not None
    assert order.duty.role is Role.PREFILL
    assert told == {
        102: (Role.DECODE, ()),
        101: (Role.PREFILL, (103, 102)),
        order.duty.instance: (Role.PREFILL, (102, 103)),
    }
    assert [controller.fleet.tally(part).capacity for part in (PREFILL, DECODE)] == [2, 2]


def test_decode_grows_by_mutation_of_what_prefill_can_spare() -> None:
    """No worker is left: only what prefill does not need goes over."""
    controller = controller_of([Role.PREFILL, Role.PREFILL, Role.DECODE], 3)
    told = duties(step(controller, MS, busy_decode(103, 99)))
    assert told == {102: (Role.DECODE, ()), 101: (Role.PREFILL, (103, 102))}
    controller = controller_of([Role.PREFILL, Role.PREFILL, Role.DECODE], 3, least=(2, 1))
    assert duties(step(controller, MS, busy_decode(103, 99))) == {}


@pytest.mark.parametrize("spares", [0, 1])
def test_what_prefill_can_spare_goes_over_and_neither_wakes_nor_loads_anything(spares: int) -> None:
    """A worker is free, or has a warm spare: one part wants an instance, the other would drain one
    in a moment, and the mutation is the answer to both."""
    controller = make_controller(4, models=(policy(),), warm_spares="recent")
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    events = [e for n, role in enumerate(roles) for e in serves(n, role)]
    order = load_order(104, W[3], 104, None)
    held = msgspec.structs.replace(report(order), is_spare=True)
    spare = [rejoined(held, nic(DEVICE))] if spares else joined(W[3])
    step(controller, 0, *events, *spare)
    commands = step(controller, MS, busy_decode(103, 99))
    assert duties(commands) == {102: (Role.DECODE, ()), 101: (Role.PREFILL, (103, 102))}
    assert loads_of(commands) == []
    assert [controller.fleet.tally(part).capacity for part in (PREFILL, DECODE)] == [1, 2]


def test_changed_limits_move_an_instance_and_drain_none() -> None:
    """It is told to one part that it has too many, and to the other that it has too few."""
    controller = controller_of([Role.PREFILL, Role.PREFILL, Role.DECODE], 3, least=(2, 1))
    # Prompts for both of the instances that one part is to have fewer of.
    step(controller, MS, *(arrived(f"r{n}", 90) for n in range(8)))
    limits = (RoleLimits(Role.PREFILL, 1, 1), RoleLimits(Role.DECODE, 2, 2))
    changed = msgspec.structs.replace(policy(), instances_min=3, instances_max=3, roles=limits)
    commands = step(controller, 2 * MS, ModelChanged(changed))
    assert duties(commands) == {102: (Role.DECODE, ()), 101: (Role.PREFILL, (103, 102))}
    assert not [c for c in commands if isinstance(c, Drain)]
    assert loads_of(commands) == []


def test_the_last_prefill_instance_stays() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE], 4)
    commands = step(controller, MS, busy_decode(102, 99))
    assert duties(commands) == {}
    (order,) = loads_of(commands)
    assert order.duty is not None
    assert order.duty.role is Role.DECODE


def test_prefill_grows_by_mutation_of_what_decode_can_spare() -> None:
    controller = controller_of([Role.PREFILL, Role.DECODE, Role.DECODE], 3)
    requests = [arrived(f"r{n}", 90) for n in range(20)]
    told = duties(step(controller, MS, *requests))
    assert told == {101: (Role.PREFILL, (102,)), 103: (Role.PREFILL, (102,))}


def test_what_a_mutated_instance_has_counts_for_its_new_part() -> None:
    controller = controller_of([Role.PREFILL, Role.PREFILL, Role.DECODE], 3)
    placed = dispatched(step(controller, MS, arrived("a"), arrived("b")))
    assert sorted(placed) == [101, 102]
    step(controller, 2 * MS, busy_decode(103, 99))
    assert (controller.router.unfinished(PREFILL), controller.router.unfinished(DECODE)) == (1, 1)


# -- links --------------------------------------------------------------------------------------


def test_plans_keep_away_from_links_that_kv_crosses() -> None:
    """BlitzScale Figure 12: KV leaves prefill instances, so a new one is loaded from a decode
    instance, whose way out is free."""
    controller = controller_of([Role.PREFILL, Role.DECODE], 4, multicast="auto")
    for worker in W[2:4]:
        step(controller, 1, WorkerLost(worker, "anew"))
    fresh = [WorkerJoined(WorkerRef(n, 1), nic(DEVICE)) for n in (2, 3)]
    step(controller, 2, *fresh)
    requests = [arrived(f"r{n}", 90) for n in range(20)]
    (plan,) = plans_of(step(controller, MS, *requests))
    senders = {str(use.link) for use in plan.links}
    assert str(W[1]) in " ".join(senders)
    assert not plan.serving_bytes
    assert plan.avoided


def test_live_instances_that_help_prefill_send_no_parameters_on() -> None:
    """BlitzScale Figure 12 (targets: B38): of a chain from the decode instance only the end helps:
    its rows and KV meet no parameters."""
    live = {"live_order": "zigzag", "live_over_ns": 0, "pairs": None}
    controller = controller_of([Role.PREFILL, Role.DECODE], 4, multicast="auto", **live)
    for worker in W[2:4]:
        step(controller, 1, WorkerLost(worker, "anew"))
    fresh = [WorkerRef(n, 1) for n in (2, 3)]
    step(controller, 2, *(WorkerJoined(worker, nic(DEVICE)) for worker in fresh))
    requests = [arrived(f"r{n}", 90) for n in range(40)]
    commands = step(controller, MS, *requests)
    orders = {o.holding.member: o for o in loads_of(commands) if o.duty is not None}
    assert set(orders) == set(fresh)
    assert {o.duty.role for o in orders.values() if o.duty} == {Role.PREFILL}
    senders = {feed.upstream for order in orders.values() for feed in order.feeds}
    helping = [w for w, o in orders.items() if o.duty and o.duty.gives_to]
    assert len(helping) == 1
    assert senders == {FromWorker(w) for w in (W[1], *(set(fresh) - set(helping)))}


def test_of_two_chains_each_end_helps_a_prefill_instance() -> None:
    """With two decode instances, whose ways out are free (targets: B38): a chain from each, and
    both new instances help, since neither sends parameters on."""
    live = {"live_order": "zigzag", "live_over_ns": 0, "pairs": None, "mutations": False}
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    controller = controller_of(roles, 6, least=(2, 2), multicast="auto", **live)
    for worker in W[4:6]:
        step(controller, 1, WorkerLost(worker, "anew"))
    fresh = [WorkerRef(n, 1) for n in (4, 5)]
    step(controller, 2, *(WorkerJoined(worker, nic(DEVICE)) for worker in fresh))
    commands = step(controller, MS, *(arrived(f"r{n}", 90) for n in range(80)))
    orders = {o.holding.member: o for o in loads_of(commands) if o.duty is not None}
    assert set(orders) == set(fresh)
    assert {o.duty.role for o in orders.values() if o.duty} == {Role.PREFILL}
    senders = {feed.upstream for order in orders.values() for feed in order.feeds}
    assert senders == {FromWorker(w) for w in W[2:4]}
    helped = [p.instance for o in orders.values() if o.duty for p in o.duty.gives_to]
    assert sorted(helped) == [101, 102]


# -- bad values ---------------------------------------------------------------------------------


def test_a_role_without_the_other_is_refused() -> None:
    with pytest.raises(ValueError, match="m: roles prefill, not prefill and decode"):
        make_policy(roles=(RoleLimits(Role.PREFILL, 1, 1),)).__post_init__()
    schedule = (Period(0, 1, 1, 1),)
    with pytest.raises(ValueError, match="a schedule and roles"):
        msgspec.structs.replace(policy(), schedule=schedule)
    with pytest.raises(ValueError, match="prefill: 0 <= min 2 <= max 1"):
        RoleLimits(Role.PREFILL, 2, 1)
