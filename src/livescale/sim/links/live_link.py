"""Messages between workers: live pairs, and the ranks of a live instance.

Their bytes cross the sender's uplink and the receiver's downlink before any parameters, one message
after the other per sender. What is under way from or to a worker that dies is lost, and whoever
talked to it hears of the loss. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from livescale.batching.live_messages import Handover, KvLayer, Taken
from livescale.member.effects import TellPeer
from livescale.sim.clock import Clock
from livescale.topology import Topology
from livescale.types import WorkerRef

_NS_PER_S = 1_000_000_000


class LivePeer(Protocol):
    """A worker as others reach it."""

    def hear(self, peer: WorkerRef, told: TellPeer) -> None: ...

    def peer_lost(self, peer: WorkerRef) -> None: ...


class LiveLink:
    """Connections between all living workers. `delay_ns` is drawn for every message; `hands` hears
    of those with which a live batch goes over, before they are under way."""

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        delay_ns: Callable[[], int],
        hands: Callable[[WorkerRef, WorkerRef], None],
    ) -> None:
        self._clock = clock
        self._topology = topology
        self._delay_ns = delay_ns
        self._hands = hands
        self._living: dict[WorkerRef, LivePeer] = {}
        #: who has ever talked to whom, both ways
        self._known: dict[WorkerRef, dict[WorkerRef, None]] = {}
        self._free_ns: dict[WorkerRef, int] = {}
        self._last_ns: dict[tuple[WorkerRef, WorkerRef], int] = {}
        #: silent workers, and what has come from or for any of them
        self._silent: dict[WorkerRef, None] = {}
        self._held: list[tuple[WorkerRef, TellPeer]] = []

    def join(self, worker: WorkerRef, peer: LivePeer) -> None:
        """The worker can be reached from now on. It is in the topology."""
        self._living[worker] = peer

    def leave(self, worker: WorkerRef) -> None:
        """The worker died, or was given up."""
        if self._living.pop(worker, None) is None:
            return
        for other in self._known.pop(worker, {}):
            self._known.get(other, {}).pop(worker, None)
            self._clock.after(self._delay_ns(), partial(self._tell_lost, other, worker))

    def send(self, sender: WorkerRef, told: TellPeer) -> None:
        """Queue a message behind those that the sender has sent before."""
        receiver = told.peer
        if sender not in self._living:
            return
        if receiver not in self._living:
            self._clock.after(self._delay_ns(), partial(self._tell_lost, sender, receiver))
            return
        self._known.setdefault(sender, {})[receiver] = None
        self._known.setdefault(receiver, {})[sender] = None
        if isinstance(told.message, Handover | Taken | KvLayer):
            self._hands(sender, receiver)
        free_ns = max(self._free_ns.get(sender, 0), self._clock.now_ns)
        free_ns += self._transfer_ns(sender, receiver, told.size_bytes)
        self._free_ns[sender] = free_ns
        arrival_ns = max(self._last_ns.get((sender, receiver), 0), free_ns + self._delay_ns())
        self._last_ns[sender, receiver] = arrival_ns
        self._clock.at(arrival_ns, partial(self._arrive, sender, told))

    def hold(self, worker: WorkerRef) -> None:
        """Nothing comes from the worker or reaches it from now on, and nothing is lost."""
        self._silent[worker] = None

    def go_on(self, worker: WorkerRef) -> None:
        """What was held up arrives, in order."""
        del self._silent[worker]
        self._free_ns[worker] = max(self.free_ns(worker), self._clock.now_ns)
        held, self._held = self._held, []
        for sender, told in held:
            self._arrive(sender, told)

    def free_ns(self, sender: WorkerRef) -> int:
        """When all that the worker has sent by now will have left it."""
        if sender in self._silent:
            return self._clock.now_ns
        return self._free_ns.get(sender, 0)

    # -- helpers --------------------------------------------------------------------------------

    def _transfer_ns(self, sender: WorkerRef, receiver: WorkerRef, size_bytes: int) -> int:
        """Over the slower of the two NICs; one without a known rate takes no time."""
        devices = self._topology.devices
        ends = (devices[sender].uplink_bytes_per_s, devices[receiver].downlink_bytes_per_s)
        rates = [rate for rate in ends if rate is not None]
        return -(-size_bytes * _NS_PER_S // min(rates)) if rates and size_bytes else 0

    def _arrive(self, sender: WorkerRef, told: TellPeer) -> None:
        receiver = told.peer
        if sender in self._silent or receiver in self._silent:
            self._held.append((sender, told))
            return
        peer = self._living.get(receiver)
        if peer is not None and sender in self._living:
            peer.hear(sender, told)

    def _tell_lost(self, worker: WorkerRef, lost: WorkerRef) -> None:
        peer = self._living.get(worker)
        if peer is not None:
            peer.peer_lost(lost)
