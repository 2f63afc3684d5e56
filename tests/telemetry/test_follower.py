"""The step that opens a further part of a record: what members hold, as the Follower knows it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from livescale.clusters.topology import Device, Host
from livescale.control.state.config import ControllerConfig
from livescale.messages.commands import AnyCommand, ChangeDuty, Drain, StartHolding
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    HoldingReport,
    LayerArrived,
    LiveStarted,
    MembersLeave,
    RoleChanged,
    WorkerJoined,
    WorkerLost,
)
from livescale.telemetry.history.follower import Follower
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty, Partner
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import (
    FromStorage,
    HoldingId,
    LayerSpan,
    ModelSpec,
    Role,
    WorkerRef,
    agent_ref,
)

LAYERS = 3
CONFIG = ControllerConfig((ModelPolicy(ModelSpec("m", (1,) * LAYERS, 1, 10), 1, 2),), 2)
DEVICE = Device("cpu", "host", "leaf", 1000, 1000)
HOST = Host("host", "leaf", 1000)
FEEDS = (Feed(FromStorage(), (ChunkRange(0, LAYERS),)),)
MEMBERS = (*(WorkerRef(number) for number in range(4)), agent_ref(0))
PARTNER = Partner(9, WorkerRef(9))

#: a member, what happens there, and how many layers are there
happenings = st.lists(
    st.tuples(
        st.sampled_from(MEMBERS),
        st.sampled_from(
            [
                "live",
                "layer",
                "whole",
                "failed",
                "dropped",
                "drain",
                "lost",
                "leave",
                "join",
                "role",
            ]
        ),
        st.integers(1, LAYERS),
    ),
    max_size=40,
)


def begun() -> Follower:
    follower = Follower()
    follower.begin(CONFIG)
    return follower


def tell(follower: Follower, *items: AnyEvent | AnyCommand) -> None:
    events = [item for item in items if isinstance(item, AnyEvent)]
    follower.step(1, events, [item for item in items if isinstance(item, AnyCommand)])


def joined(member: WorkerRef, *held: HoldingReport) -> AnyEvent:
    if member.is_agent:
        return AgentJoined(member, HOST, held)
    return WorkerJoined(member, DEVICE, held)


def order(
    plan: int, member: WorkerRef, feeds: tuple[Feed, ...] = FEEDS, *, is_live: bool = False
) -> StartHolding:
    """The order for a member, of which a worker's makes an instance with the plan's number."""
    live_order, gives_to = ("zigzag", (PARTNER,)) if is_live else (None, ())
    duty = Duty(plan, (member,), live_order=live_order, gives_to=gives_to)
    if member.is_agent:
        duty = None
    return StartHolding(
        HoldingId(plan, member), "m", LayerSpan(0, LAYERS), feeds, 1, duty=duty, reason="why"
    )


def change(holding: HoldingId, role: Role, *, is_live: bool = False) -> ChangeDuty:
    """Another duty for its instance: this role, and where requests decode."""
    duty = order(holding.plan, holding.member, is_live=is_live).duty
    assert duty is not None
    decodes_at = (PARTNER,) if role is Role.PREFILL else ()
    return ChangeDuty(holding, msgspec.structs.replace(duty, role=role, decodes_at=decodes_at))


def test_members_join_with_the_duties_that_they_were_told_last() -> None:
    follower, worker = begun(), MEMBERS[0]
    tell(follower, joined(worker), order(1, worker))
    first = change(HoldingId(1, worker), Role.PREFILL)
    tell(follower, first, change(HoldingId(9, worker), Role.DECODE))
    [member], _ = follower.opening()
    assert member == joined(worker, replace_duty(order(1, worker, ()), first.duty))
    assert follower.instances[1].role is Role.PREFILL


def test_a_change_of_role_lasts_from_the_order_until_the_instance_has_the_role() -> None:
    follower, worker = begun(), MEMBERS[0]
    holding = HoldingId(1, worker)

    def tell_at(now_ns: int, item: AnyEvent | AnyCommand) -> None:
        is_event = isinstance(item, AnyEvent)
        follower.step(now_ns, [item] if is_event else [], [] if is_event else [item])

    tell(follower, joined(worker), order(1, worker))
    tell_at(10, RoleChanged(holding, Role.UNIFIED))
    tell_at(20, change(holding, Role.PREFILL))
    tell_at(23, RoleChanged(holding, Role.PREFILL))
    tell_at(30, change(holding, Role.DECODE))
    tell_at(31, change(holding, Role.PREFILL))
    tell_at(32, RoleChanged(holding, Role.DECODE))
    tell_at(36, RoleChanged(holding, Role.PREFILL))
    tell_at(40, RoleChanged(HoldingId(9, worker), Role.DECODE))
    assert follower.instances[1].role_changes == [(Role.PREFILL, 3), (Role.PREFILL, 5)]


def replace_duty(command: StartHolding, duty: Duty) -> HoldingReport:
    """What a worker that loads reports with this duty."""
    return HoldingReport(msgspec.structs.replace(command, duty=duty), 0, is_whole=False)


def test_members_join_with_what_what_they_hold_and_what_drains_is_drained() -> None:
    whole, live, early, empty, agent = MEMBERS
    follower = begun()
    tell(follower, joined(agent), *(joined(member) for member in MEMBERS[:4]))
    tell(follower, joined(WorkerRef(7)), order(7, WorkerRef(7)), WorkerLost(WorkerRef(7), "gone"))
    tell(follower, order(1, whole, is_live=True), order(2, live, is_live=True))
    tell(follower, order(3, early, is_live=True), order(4, agent))
    tell(follower, LiveStarted(HoldingId(1, whole)), HoldingCompleted(HoldingId(1, whole), 3))
    tell(follower, LiveStarted(HoldingId(2, live)), LayerArrived(HoldingId(2, live), 1, 2))
    tell(follower, LayerArrived(HoldingId(4, agent), 0, 1), Drain(1))
    assert follower.opening() == (
        [
            joined(whole, HoldingReport(order(1, whole, ()), LAYERS, is_whole=True)),
            joined(live, HoldingReport(order(2, live, (), is_live=True), 2, is_whole=False)),
            joined(early, HoldingReport(order(3, early, ()), 0, is_whole=False)),
            joined(empty),
            joined(agent, HoldingReport(order(4, agent, ()), 1, is_whole=False)),
        ],
        [Drain(1)],
    )


@given(happenings)
def test_who_reads_an_opening_alone_would_open_with_the_same(
    story: list[tuple[WorkerRef, str, int]],
) -> None:
    follower = begun()
    #: what each member that is there holds
    held: dict[WorkerRef, HoldingId | None] = {}
    for plan, (member, what, layers) in enumerate(story):
        holding = held.get(member)
        if what == "lost":
            held.pop(member, None)
            tell(follower, WorkerLost(member, "gone"))
        elif what == "leave":
            tell(follower, MembersLeave((member,)))
        elif what == "join" or member not in held:
            # A member that joins again, with nothing, has lost what was there.
            held[member] = None
            tell(follower, joined(member))
        elif holding is None:
            held[member] = HoldingId(plan, member)
            tell(follower, order(plan, member, is_live=plan % 2 == 1))
        elif what in ("failed", "dropped"):
            held[member] = None
            is_failed = what == "failed"
            tell(follower, HoldingFailed(holding, "") if is_failed else HoldingDropped(holding))
        elif what == "layer":
            tell(follower, LayerArrived(holding, layers - 1, layers))
        elif what == "whole":
            tell(follower, HoldingCompleted(holding, LAYERS))
        elif what == "drain" and not member.is_agent:
            tell(follower, Drain(holding.plan))
        elif what == "role" and not member.is_agent:
            role = list(Role)[layers % len(Role)]
            tell(follower, change(holding, role, is_live=holding.plan % 2 == 1))
        elif what == "live" and not member.is_agent and holding.plan % 2:
            tell(follower, LiveStarted(holding))
    members, draining = follower.opening()
    alone = begun()
    tell(alone, *members, *draining)
    members_alone, draining_alone = alone.opening()
    assert members_alone == members
    assert sorted(d.instance for d in draining_alone) == sorted(d.instance for d in draining)
    assert alone.instances.keys() == follower.instances.keys()
    for number, instance in alone.instances.items():
        assert instance.is_whole == follower.instances[number].is_whole
        assert instance.state is follower.instances[number].state
        assert instance.role is follower.instances[number].role
