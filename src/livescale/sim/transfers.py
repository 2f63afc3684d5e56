"""Transfers under way: which layers arrive where and when, and what breaks when a node goes.

Chains are followed hop by hop, as the orders reach the workers: a hop flows once its receiver is
ready and its sender sends or receives itself. Workers are told, nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from livescale.messages.commands import StartLoad, StartSend
from livescale.sim.clock import Clock
from livescale.sim.network import Network
from livescale.types import FromStorage, FromWorker, ModelSpec, PlanId, WorkerRef


class SimLoadListener(Protocol):
    """Hears of the layers of one worker."""

    def load_started(self, order: StartLoad) -> None: ...

    def layer_arrived(self, order: StartLoad, watermark: int) -> None: ...

    def load_failed(self, order: StartLoad, reason: str) -> None: ...


class SimSendListener(Protocol):
    """Hears how a source's send ended."""

    def send_ended(self, order: StartSend, sent_bytes: int, error: str | None) -> None: ...


@dataclass(slots=True)
class _Flow:
    """What one target receives. `place` is 0 until the bytes flow, then its place in the chain.

    Times are absolute: when the first byte and each layer arrive, set when the bytes flow.
    """

    order: StartLoad
    spec: ModelSpec
    listener: SimLoadListener
    place: int = 0
    first_byte_ns: int = 0
    arrivals_ns: tuple[int, ...] = ()
    watermark: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _Send:
    order: StartSend
    listener: SimSendListener


class Transfers:
    """All flows of the world, by (plan, target)."""

    def __init__(self, clock: Clock, network: Network, timeout_ns: int) -> None:
        self._clock = clock
        self._network = network
        self._timeout_ns = timeout_ns
        self._flows: dict[tuple[PlanId, WorkerRef], _Flow] = {}
        self._sends: dict[tuple[PlanId, WorkerRef], _Send] = {}

    def receive(self, order: StartLoad, spec: ModelSpec, listener: SimLoadListener) -> None:
        """The worker is ready for the layers; its upstream may not send yet."""
        flow = _Flow(order, spec, listener)
        self._flows[order.plan, order.worker] = flow
        if isinstance(order.upstream, FromStorage):
            arrivals = self._network.storage_arrivals_ns(spec.layer_bytes)
            self._start(flow, 1, 0, arrivals)
        else:
            self._try_start(order.plan, order.worker)
            self._clock.after(self._timeout_ns, lambda: self._give_up(flow))

    def send(self, order: StartSend, listener: SimSendListener) -> None:
        """The source sends what it holds, or what it still receives, once the target is ready."""
        send = _Send(order, listener)
        self._sends[order.plan, order.target] = send
        self._try_start(order.plan, order.target)
        self._clock.after(self._timeout_ns, lambda: self._give_up_send(send))

    def node_gone(self, worker: WorkerRef) -> None:
        """The worker died or dropped its bytes: it receives nothing more and sends nothing more."""
        for key in [key for key in self._flows if key[1] == worker]:
            self._end_send(key, "the target is gone")
            self._flows.pop(key).is_over = True
        for key in [key for key, send in self._sends.items() if send.order.source == worker]:
            self._end_send(key, "the model was dropped while it was sent")
        for flow in list(self._flows.values()):
            if not flow.is_over and flow.order.upstream == FromWorker(worker) and flow.place:
                self._fail(flow, f"upstream {worker} is gone")

    # -- helpers, in the order used -----------------------------------------------------------

    def _try_start(self, plan: PlanId, target: WorkerRef) -> None:
        flow = self._flows.get((plan, target))
        if flow is None or flow.place:
            return
        place = self._place(flow)
        if place is None:
            return
        layer_bytes = flow.spec.layer_bytes
        first_byte_ns = self._network.first_byte_ns(layer_bytes, place)
        arrivals_ns = self._network.chain_arrivals_ns(layer_bytes, place)
        self._start(flow, place, first_byte_ns, arrivals_ns)

    def _place(self, flow: _Flow) -> int | None:
        """The flow's place in its chain, or None while its sender is not ready."""
        plan, target = flow.order.plan, flow.order.worker
        before = self._upstream_flow(flow)
        if before is not None and not before.place:
            return None
        send = self._sends.get((plan, target))
        if send is not None and FromWorker(send.order.source) == flow.order.upstream:
            return 1
        if before is None or (before.order.plan, before.order.forward_to) != (plan, target):
            return None
        return before.place + 1

    def _upstream_flow(self, flow: _Flow) -> _Flow | None:
        """What the sender receives or has received itself, if it was not always there."""
        flows = (
            f for f in self._flows.values() if FromWorker(f.order.worker) == flow.order.upstream
        )
        return next(flows, None)

    def _start(
        self, flow: _Flow, place: int, first_byte_ns: int, arrivals_ns: tuple[int, ...]
    ) -> None:
        """Let the bytes flow, and those that wait for them further down."""
        now_ns = self._clock.now_ns
        flow.place = place
        flow.first_byte_ns = now_ns + first_byte_ns
        flow.arrivals_ns = tuple(now_ns + arrival_ns for arrival_ns in arrivals_ns)
        before = self._upstream_flow(flow)
        if before is not None:
            # Whoever joins behind a sender that is still receiving cannot overtake it.
            lag_ns = self._network.chunk_ns(flow.spec.layer_bytes)
            flow.first_byte_ns = max(flow.first_byte_ns, before.first_byte_ns + lag_ns)
            flow.arrivals_ns = tuple(
                max(own_ns, sender_ns + lag_ns)
                for own_ns, sender_ns in zip(flow.arrivals_ns, before.arrivals_ns, strict=True)
            )
        self._clock.at(flow.first_byte_ns, lambda: self._first_byte(flow))
        self._next_layer(flow)
        plan, worker = flow.order.plan, flow.order.worker
        if flow.order.forward_to is not None:
            self._try_start(plan, flow.order.forward_to)
        for other_plan, target in [k for k, s in self._sends.items() if s.order.source == worker]:
            self._try_start(other_plan, target)

    def _first_byte(self, flow: _Flow) -> None:
        if not flow.is_over:
            flow.listener.load_started(flow.order)

    def _next_layer(self, flow: _Flow) -> None:
        # Arrivals are chained, so that an aborted flow leaves at most one action behind.
        self._clock.at(flow.arrivals_ns[flow.watermark], lambda: self._arrive(flow))

    def _arrive(self, flow: _Flow) -> None:
        if flow.is_over:
            return
        flow.watermark += 1
        flow.is_over = flow.watermark == len(flow.arrivals_ns)
        if flow.is_over:
            self._end_send((flow.order.plan, flow.order.worker), None)
        else:
            self._next_layer(flow)
        flow.listener.layer_arrived(flow.order, flow.watermark)

    def _end_send(self, key: tuple[PlanId, WorkerRef], error: str | None) -> None:
        send = self._sends.pop(key, None)
        if send is not None:
            flow = self._flows.get(key)
            sent_bytes = sum(flow.spec.layer_bytes[: flow.watermark]) if flow is not None else 0
            send.listener.send_ended(send.order, sent_bytes, error)

    def _give_up(self, flow: _Flow) -> None:
        if not flow.place and not flow.is_over:
            self._fail(flow, "nobody sends")

    def _give_up_send(self, send: _Send) -> None:
        key = (send.order.plan, send.order.target)
        if self._sends.get(key) is send and key not in self._flows:
            self._end_send(key, "the target does not answer")

    def _fail(self, flow: _Flow, reason: str) -> None:
        flow.is_over = True
        flow.listener.load_failed(flow.order, reason)
