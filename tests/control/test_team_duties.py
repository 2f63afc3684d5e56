"""Teams in the controller: what a lost member costs their requests, and the router's shares."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from stories import (
    SPEC,
    W,
    arrived,
    joined,
    load_order,
    loads_of,
    make_controller,
    make_policy,
    rejoined,
    report,
    reported,
    step,
)

from livescale.control.controller import Controller
from livescale.messages.commands import AnyCommand, ChangeDuty, Dispatch
from livescale.messages.events import (
    AnyEvent,
    LayerArrived,
    LiveStarted,
    MembersLeave,
    RequestEnded,
    WorkerLost,
)
from livescale.values.types import LayerSpan, Outcome, WorkerRef


def a_team(members: int = 2, beside: int = 0) -> tuple[Controller, list[WorkerRef]]:
    """A controller with one team of instances that load, a decoder layer each, and its members,
    the leader first; so many instances `beside` it have everything. Time is 2 then."""
    spec = msgspec.structs.replace(SPEC, layer_bytes=(5, *[20] * members, 5))
    policy = make_policy(least=members + beside, spec=spec)
    controller = make_controller(
        members + beside, models=(policy,), teams="cover", multicast="binomial", avoid_ns=100
    )
    layers = LayerSpan(0, spec.layers)
    for n in range(beside):
        order = load_order(101 + n, W[members + n], 101 + n, None)
        held = report(msgspec.structs.replace(order, span=layers), spec.layers)
        step(controller, 0, rejoined(held), reported(101 + n))
    orders = loads_of(step(controller, 0, *joined(*W[:members])))
    holdings = [order.holding for order in orders]
    came = [LayerArrived(holding, n, 0) for n, holding in enumerate(holdings, 1)]
    ends = [LayerArrived(holdings[0], 0, 2), LayerArrived(holdings[-1], members + 1, 0)]
    told = step(controller, 1, *came, *ends)
    (team,) = {c.duty.team for c in told if isinstance(c, ChangeDuty)}
    assert team is not None
    assert [m.partner.worker for m in team.members] == [h.member for h in holdings]
    step(controller, 2, LiveStarted(holdings[0]))
    return controller, [holding.member for holding in holdings]


def sent(commands: list[AnyCommand]) -> Counter[WorkerRef]:
    return Counter(command.worker for command in commands if isinstance(command, Dispatch))


@pytest.mark.parametrize(
    ("leaves", "failures"), [(False, 1), (True, 0)], ids=["dies", "leaves in order"]
)
@pytest.mark.parametrize("is_told_first", [False, True])
def test_a_lost_member_costs_the_teams_requests_an_attempt(
    is_told_first: bool, leaves: bool, failures: int
) -> None:
    """One, whichever comes first, the leader's word or the loss: one of them may have ended the
    member. None if the member's host wanted to go."""
    controller, (leader, member) = a_team()
    assert sent(step(controller, 3, arrived("r"))) == {leader: 1}
    if leaves:
        step(controller, 4, MembersLeave((member,)))
    lost = WorkerLost(member, "gone")
    given_back = RequestEnded("r", 1, Outcome.RETURNED, worker=leader)
    news: list[AnyEvent] = [lost, given_back] if is_told_first else [given_back, lost]
    for now_ns, event in enumerate(news, 5):
        step(controller, now_ns, event)
    assert controller.router.requests["r"].failures == failures


def test_what_a_leader_gives_back_for_a_link_costs_no_attempt() -> None:
    controller, (leader, _) = a_team()
    step(controller, 3, arrived("r"))
    step(controller, 4, RequestEnded("r", 1, Outcome.RETURNED, worker=leader))
    assert controller.router.requests["r"].failures == 0


def test_a_suspect_is_blamed_for_the_member_and_those_beside_it_are_not() -> None:
    """The request that had lost a worker before."""
    controller, (leader, member) = a_team(beside=1)
    assert sent(step(controller, 3, arrived("r"))) == {leader: 1}
    assert sent(step(controller, 4, arrived("poison"))) == {W[2]: 1}
    assert sent(step(controller, 5, WorkerLost(W[2], "gone"))) == {leader: 1}
    back = [
        RequestEnded(request, attempt, Outcome.RETURNED, worker=leader)
        for request, attempt in (("poison", 2), ("r", 1))
    ]
    step(controller, 6, *back, WorkerLost(member, "gone"))
    records = controller.router.requests
    assert (records["poison"].failures, records["r"].failures) == (2, 0)


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("beside", [1, 2, 3])
def test_a_team_gets_the_requests_of_as_many_instances(members: int, beside: int) -> None:
    """By way of its leader: the others of the team get none of their own."""
    controller, (leader, *others) = a_team(members, beside)
    each = 8
    commands = step(controller, 3, *(arrived(f"r{n}") for n in range(each * (members + beside))))
    found = sent(commands)
    assert found[leader] == pytest.approx(each * members, abs=1)
    assert not any(found[other] for other in others)
    for n in range(beside):
        assert found[W[members + n]] == pytest.approx(each, abs=1)
