"""Every Route that the controller writes for a model of whole instances, and the KV that moves on
it (DESIGN §8).

Where a running request moves there is no Route: its owner's Duty names who may take it
(`test_drains.py`), and KV of all layers goes along (`test_routes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from stories import (
    DEVICE,
    W,
    arrived,
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
from livescale.messages.events import AnyEvent, LiveStarted, WorkerJoined
from livescale.values.routes import Does, KvMove, Partner, Route, Stage, kv_moves
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.types import InstanceId, LayerSpan, ModelSpec, Role

LAYERS, CUT = 8, 4
SPAN, DECODERS = LayerSpan(0, LAYERS + 2), LayerSpan(1, LAYERS + 1)
SPEC = ModelSpec("m", (10,) * SPAN.stop, kv_bytes_per_token=1, model_tokens_max=100)
LARGE = msgspec.structs.replace(DEVICE, arena_bytes=1000)
#: instances that serve: their roles, and who they are. T is the first one that is loaded then.
ROLES = {
    "S": Role.UNIFIED,
    "P": Role.PREFILL,
    "Q": Role.PREFILL,
    "D": Role.DECODE,
    "E": Role.DECODE,
}
SERVING = {name: Partner(101 + n, W[n]) for n, name in enumerate(ROLES)}
FREE = W[len(ROLES) :]
NAMES = {partner.instance: name for name, partner in SERVING.items()} | {2: "T"}


@dataclass(frozen=True)
class Case:
    """A model of which some instances serve, and workers that are free when more prompts come than
    these can compute: new instances work while they load."""

    name: str
    serving: str
    #: as in DESIGN §8: for each hop (who may take it, span, does)
    route: str
    #: KV that the rule moves if the first of each hop takes the request, and a pull cuts at CUT
    moves: str = ""
    free: int = 0
    has_roles: bool = False


CASES = (
    Case("unified", "S", "(S, all, both)"),
    Case(
        "prefill/decode roles",
        "PDE",
        "(P, all, prefill) (D|E, all, decode)",
        "P->D [1, 9)",
        has_roles=True,
    ),
    Case("prefill alone", "P", "(P, all, both)", has_roles=True),
    Case("decode alone", "D", "(D, all, both)", has_roles=True),
    Case("live pair", "S", "(T, open, prefill) (S, open, both)", "T->S [1, 4)", free=1),
    Case(
        "live pair with roles",
        "PD",
        "(T, open, prefill) (P, open, prefill) (D, all, decode)",
        # Two holders, one taker: `test_kv_holders.py` has the messages of that.
        "T->D [1, 4), P->D [4, 9)",
        free=1,
        has_roles=True,
    ),
    Case("no partner, from zero", "", "(T, open, both)", free=1),
    Case("no partner, from zero, with roles", "", "(T, open, both)", free=2, has_roles=True),
    Case(
        "no partner, with roles",
        "D",
        "(T, open, prefill) (D, all, decode)",
        "T->D [1, 9)",
        free=1,
        has_roles=True,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_route_and_the_kv_that_moves_on_it(case: Case) -> None:
    controller = controller_of(case)
    commands = step(controller, 1, *(arrived(f"r{n}", 90) for n in range(40)))
    live = [order for order in loads_of(commands) if order.duty and order.duty.live_order]
    step(controller, 2, *(LiveStarted(order.holding) for order in live))
    (route,) = controller.roles.routes(2, controller.models["m"].entry)
    assert written(route) == case.route
    assert told(kv_moves(*stages(route))) == case.moves


def test_an_instance_that_changes_its_role_moves_nothing() -> None:
    """Q computed a prompt and decodes it: the same instance, with another role. What P computes
    from now on may decode there."""
    controller = controller_of(Case("mutation", "PQD", "", has_roles=True))
    entry = controller.models["m"].entry
    assert [written(route) for route in controller.roles.routes(0, entry)] == [
        "(P, all, prefill) (D, all, decode)",
        "(Q, all, prefill) (D, all, decode)",
    ]
    full = reported(SERVING["D"].instance, running=4)
    step(controller, 1, msgspec.structs.replace(full, kv_blocks_used=99))
    assert [written(route) for route in controller.roles.routes(1, entry)] == [
        "(P, all, prefill) (Q|D, all, decode)"
    ]
    at_q = [(SERVING["Q"].instance, DECODERS)]
    assert kv_moves(at_q, at_q) == []


# -- fleets -------------------------------------------------------------------------------------


def controller_of(case: Case) -> Controller:
    """Instances of an earlier controller's life serve; other workers are free."""
    controller = make_controller(
        len(case.serving) + case.free,
        models=(policy(case),),
        live_order="zigzag",
        live_over_ns=0,
        pairs=None,
    )
    events = [event for name in case.serving for event in serves(name)]
    free = [WorkerJoined(worker, LARGE) for worker in FREE[: case.free]]
    step(controller, 0, *events, *free)
    return controller


def policy(case: Case) -> ModelPolicy:
    """No instance more than one is loaded of each role, and those that decode stay."""
    roles = [ROLES[name] for name in case.serving]
    prefill, decode = roles.count(Role.PREFILL), roles.count(Role.DECODE)
    limits = (
        RoleLimits(Role.PREFILL, min(prefill, 1), prefill + 1),
        RoleLimits(Role.DECODE, decode, decode + 1),
    )
    most = len(roles) + (2 if case.has_roles else 1)
    base = make_policy(least=0, most=most, roles=limits if case.has_roles else ())
    return msgspec.structs.replace(base, spec=SPEC)


def serves(name: str) -> list[AnyEvent]:
    """A worker joins and reports an instance that serves and has nothing to do."""
    partner = SERVING[name]
    order = load_order(partner.instance, partner.worker, partner.instance, None)
    assert order.duty is not None
    duty = msgspec.structs.replace(order.duty, role=ROLES[name])
    order = msgspec.structs.replace(order, span=SPAN, duty=duty)
    return [rejoined(report(order, SPAN.stop), LARGE), reported(partner.instance)]


# -- routes -------------------------------------------------------------------------------------


def stages(route: Route) -> tuple[list[Stage], list[Stage]]:
    """The layers that a request's prefill runs at each hop, and those that decode runs at the last
    one."""
    prefill = [hop.partners[0] for hop in route.hops if hop.does is not Does.DECODE]
    spans = [DECODERS]
    if len(prefill) == 2:
        spans = [LayerSpan(1, CUT), LayerSpan(CUT, DECODERS.stop)]
    done = [(who.instance, span) for who, span in zip(prefill, spans, strict=True)]
    return done, [(route.hops[-1].partners[0].instance, DECODERS)]


def written(route: Route) -> str:
    hops = []
    for hop in route.hops:
        assert hop.span in (None, SPAN)
        who = "|".join(name_of(partner.instance) for partner in hop.partners)
        hops.append(f"({who}, {'open' if hop.span is None else 'all'}, {hop.does})")
    return " ".join(hops)


def told(moves: list[KvMove]) -> str:
    return ", ".join(
        f"{name_of(m.sender)}->{name_of(m.receiver)} [{m.span.start}, {m.span.stop})" for m in moves
    )


def name_of(instance: InstanceId) -> str:
    return NAMES.get(instance, str(instance))
