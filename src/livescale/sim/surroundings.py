"""What a simulated worker has around it. Values and ways out only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from livescale.messages.events import AnyEvent
from livescale.sim.checkers import Checkers
from livescale.sim.clock import Clock
from livescale.sim.config import SimConfig
from livescale.sim.live_checker import LiveChecker
from livescale.sim.worker_messages import FromWorkerMessage, PeerMessage
from livescale.topology import Device
from livescale.types import RequestId, WorkerRef


@dataclass(frozen=True, slots=True)
class SimSurroundings:
    """The world of one worker. `say`, `emit` and `tell` hand messages to the controller, the
    gateway and another worker (with the bytes that come along)."""

    ref: WorkerRef
    device: Device
    config: SimConfig
    clock: Clock
    checkers: Checkers
    live_checker: LiveChecker
    say: Callable[[AnyEvent], None]
    emit: Callable[[FromWorkerMessage], None]
    tell: Callable[[WorkerRef, PeerMessage, int], None]
    #: attempts that others took over from here and may not have told the gateway of, by taker,
    #: with the time
    given: dict[WorkerRef, dict[tuple[RequestId, int], int]]
