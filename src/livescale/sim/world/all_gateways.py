"""The gateways of a simulated world: their lives, who asks which of them, and their connections to
workers. One that is lost takes its requests with it, and comes back under another name, as the
processes of a pool do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from livescale.load.traces import TraceRow
from livescale.member.inputs import GatewayGone, GatewayUnknown, MemberInput
from livescale.messages.attempts import AttemptTaken
from livescale.sim.base.clock import Clock
from livescale.sim.base.config import SimConfig
from livescale.sim.base.poison import Poison
from livescale.sim.links.channel import Delays, SimChannel
from livescale.sim.world.gateway import FromWorkerMessage, SimGateway, ToWorkerMessage
from livescale.values.types import RequestId, WorkerRef, gateway_of

_ONLY = "gateway"
"""The name of one that is alone and stays."""


class Gateways:
    """Those of one world. `begin` when everything else is there."""

    def __init__(self, config: SimConfig, clock: Clock, delays: Delays, poison: Poison) -> None:
        self._config = config
        self._clock = clock
        self._delays = delays
        self._poison = poison
        self._is_alone = config.gateways == 1 and not config.faults.gateway_losses
        #: those that are there
        self.by_name: dict[str, SimGateway] = {}
        self._arrivals = 0
        #: what has come while no gateway was there
        self._waiting: list[tuple[RequestId, str, TraceRow]] = []
        #: by the name that a request has in the load
        self._requests: dict[RequestId, RequestId] = {}
        #: how living workers are given something
        self._workers: dict[WorkerRef, Callable[[MemberInput], None]] = {}
        #: by gateway and worker, what the worker sends, and what it is sent: that stays until the
        #: worker knows that the gateway is gone
        self._answers: dict[tuple[str, WorkerRef], SimChannel[FromWorkerMessage]] = {}
        self._orders: dict[tuple[str, WorkerRef], SimChannel[ToWorkerMessage]] = {}

    def name_of(self, request: RequestId) -> str:
        """Of the gateway that answers for the request."""
        return _ONLY if self._is_alone else gateway_of(request)

    # -- clients --------------------------------------------------------------------------------

    def arrive(self, request: RequestId, model: str, row: TraceRow) -> None:
        """A request of the load comes to one gateway after the other; where none is there, it comes
        again when one is."""
        if not self.by_name:
            self._waiting.append((request, model, row))
            return
        name = list(self.by_name)[self._arrivals % len(self.by_name)]
        self._arrivals += 1
        known = request if self._is_alone else f"{name}-{request.replace('-', '.')}"
        self._requests[request] = known
        self._poison.draw(known, row)
        self.by_name[name].arrive(known, model, row)

    def cancel(self, request: RequestId) -> None:
        """The client of a request of the load goes away, if it is still there."""
        known = self._requests.get(request)
        gateway = None if known is None else self.by_name.get(self.name_of(known))
        if known is not None and gateway is not None:
            gateway.cancel(known)

    def all_ended(self) -> None:
        """The world is over: every request has ended."""
        assert not self._waiting, f"{len(self._waiting)} requests found no gateway"
        for gateway in self.by_name.values():
            gateway.all_ended()

    # -- lives ----------------------------------------------------------------------------------

    def begin(
        self,
        make: Callable[[str], SimGateway],
        ended: Callable[[SimGateway, int], None],
        is_silent: Callable[[WorkerRef], bool],
    ) -> None:
        """All of them are there from now on. `make` makes one, and tells others of it; `ended` is
        told of one that is lost, and that nothing arrives which it sent after that time. Nothing
        reaches a worker that `is_silent`."""
        self._make, self._ended, self._is_silent = make, ended, is_silent
        for number in range(self._config.gateways):
            self._start(_ONLY if self._is_alone else f"g{number}.1")

    def lose(self, choice: int) -> None:
        """One of them dies, if one is there: the last of what it sent is lost."""
        if not self.by_name:
            return
        name = list(self.by_name)[choice % len(self.by_name)]
        gateway = self.by_name.pop(name)
        lost_after_ns = self._clock.now_ns - self._delays.loss_window_ns()
        for worker in self._workers:
            if (name, worker) in self._answers:
                self._answers.pop((name, worker)).cut(-1)
                end = partial(self._end_seen, name, worker)
                self._orders[name, worker].cut(lost_after_ns, end)
        gateway.die()
        self._ended(gateway, lost_after_ns)
        number, life = name.split(".")
        successor = f"{number}.{int(life) + 1}"
        self._clock.after(self._config.faults.rejoin_ns, partial(self._start, successor))

    def _start(self, name: str) -> None:
        gateway = self.by_name[name] = self._make(name)
        for worker in self._workers:
            if not self._is_silent(worker):
                self._connect(gateway, worker)
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            self.arrive(*arrival)

    # -- workers --------------------------------------------------------------------------------

    def join(self, worker: WorkerRef, put: Callable[[MemberInput], None]) -> None:
        """The worker is there, and is given things by `put`: it has a connection with each gateway
        from now on."""
        self._workers[worker] = put
        for gateway in self.by_name.values():
            if (gateway.name, worker) not in self._answers:
                self._connect(gateway, worker)

    def leave(self, worker: WorkerRef, lost_after_ns: int) -> None:
        """The worker has died: what it sent after that time is lost, then comes the end."""
        del self._workers[worker]
        for gateway in self.by_name.values():
            answers = self._answers.pop((gateway.name, worker), None)
            if answers is not None:
                answers.cut(lost_after_ns, partial(gateway.worker_gone, worker))
        for key in [key for key in self._orders if key[1] == worker]:
            del self._orders[key]

    def connected(self, gateway: SimGateway) -> list[WorkerRef]:
        """Workers that the gateway has a connection with."""
        return [worker for name, worker in self._answers if name == gateway.name]

    def give_up(self, gateway: SimGateway, worker: WorkerRef) -> None:
        """The gateway ends its connection with the worker, which cannot see that yet."""
        self._answers.pop((gateway.name, worker)).cut(-1)
        self._orders[gateway.name, worker].cut(-1)
        gateway.worker_gone(worker)

    def see_ends(self, worker: WorkerRef) -> bool:
        """The worker finds out which connections have ended. Whether it lacks any now."""
        for name, known in list(self._orders):
            if known == worker:
                self._end_seen(name, worker)
        return any((name, worker) not in self._answers for name in self.by_name)

    def channels(self, worker: WorkerRef) -> list[SimChannel[Any]]:
        """The connections of a worker, both ways."""
        found: list[SimChannel[Any]] = []
        for key, orders in self._orders.items():
            if key[1] == worker:
                found += [self._answers[key], orders] if key in self._answers else [orders]
        return found

    def answer(self, worker: WorkerRef, name: str, message: FromWorkerMessage) -> None:
        """A worker sends a gateway a message, if there is a connection."""
        if (name, worker) in self._answers:
            self._answers[name, worker].send(message)
        elif isinstance(message, AttemptTaken) and worker in self._workers:
            self._workers[worker](GatewayUnknown(name, message.request, message.attempt))

    def _connect(self, gateway: SimGateway, worker: WorkerRef) -> None:
        key = gateway.name, worker
        self._answers[key] = SimChannel(
            self._clock, self._delays.of_worker_ns, partial(gateway.take_message, worker)
        )
        self._orders[key] = SimChannel(self._clock, self._delays.plain_ns, self._workers[worker])
        gateway.meet(worker, self._orders[key])

    def _end_seen(self, name: str, worker: WorkerRef) -> None:
        """The worker finds that the connection has ended, if it has and the worker can."""
        key = name, worker
        if key in self._orders and key not in self._answers and not self._is_silent(worker):
            del self._orders[key]
            self._workers[worker](GatewayGone(name))
