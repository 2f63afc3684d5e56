"""What surrounds a simulated member: the way into the world, and what looks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from livescale.member.effects import TellPeer
from livescale.member.member import Member
from livescale.messages.events import AnyEvent
from livescale.sim.checkers.invariants import Checkers
from livescale.sim.checkers.live import LiveChecker
from livescale.sim.clock import Clock
from livescale.sim.config import SimConfig
from livescale.sim.links.transfers import Transfers
from livescale.sim.refusals import Refusals
from livescale.sim.worker_messages import FromWorkerMessage
from livescale.topology import Device, Host
from livescale.types import WorkerRef


@dataclass(frozen=True, slots=True)
class MemberWorld:
    """Of one life of a member: a worker has a `device`, an agent a `host`. `report` sends events to
    the controller, `emit` answers to the gateway, `tell` messages to other workers. `make_member`
    takes the arguments of a Member."""

    ref: WorkerRef
    config: SimConfig
    clock: Clock
    transfers: Transfers
    refusals: Refusals
    checkers: Checkers
    live_checker: LiveChecker
    report: Callable[[AnyEvent], None]
    emit: Callable[[FromWorkerMessage], None]
    tell: Callable[[TellPeer], None]
    make_member: Callable[..., Member]
    device: Device | None = None
    host: Host | None = None
