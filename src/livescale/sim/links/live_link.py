"""Messages between workers: live pairs, and the ranks of a live instance.

Their bytes cross links as serving traffic (`serving_traffic.py`); from one worker to another they
stay in order. What is under way from or to a worker that dies is lost, and those that
talked to that worker get news of the loss; and so it is with two workers whose line breaks. One
that was given up while it was silent, and lives on, learns that its connections were closed.
Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from livescale.batching.contract.live_messages import Handover, KvLayer, Taken
from livescale.member.effects import TellPeer
from livescale.member.inputs import MemberInput, PeerLost, PeerSent, RankLayers
from livescale.sim.base.clock import Clock
from livescale.sim.links.serving_traffic import ServingTraffic
from livescale.values.types import WorkerRef

Put = Callable[[MemberInput], None]
"""What hands a worker its inputs."""

_OF_RANKS = -1


class LineDelays(Protocol):
    """What happens to messages between workers."""

    def of_worker_ns(self) -> int:
        """How late a message is."""

    def line_loss_ns(self) -> int | None:
        """If a message breaks the line of its two workers: until when."""


class LiveLink:
    """Connections between all living workers. `delays` are drawn for every message, some of
    which break the line of their two workers; `hands` is called for those with which a live batch
    goes over, before they are under way."""

    def __init__(
        self,
        clock: Clock,
        serving: ServingTraffic,
        delays: LineDelays,
        hands: Callable[[WorkerRef, WorkerRef], None],
    ) -> None:
        self._clock = clock
        self._serving = serving
        self._delay_ns, self._line_loss_ns = delays.of_worker_ns, delays.line_loss_ns
        self._hands = hands
        self._living: dict[WorkerRef, Put] = {}
        #: who has ever talked to whom, both ways
        self._known: dict[WorkerRef, dict[WorkerRef, None]] = {}
        self._last_ns: dict[tuple[WorkerRef, WorkerRef], int] = {}
        #: silent workers, and what has come from or for any of them
        self._silent: dict[WorkerRef, None] = {}
        self._held: list[tuple[WorkerRef, TellPeer, int]] = []
        #: workers that were given up while they were silent, with those that they had talked to
        self._given_up: dict[WorkerRef, tuple[Put, tuple[WorkerRef, ...]]] = {}
        #: of two workers whose line broke: how often, and when they reach one another again
        self._breaks: dict[frozenset[WorkerRef], tuple[int, int]] = {}
        #: of how many of these breaks the first has learned
        self._learned: dict[tuple[WorkerRef, WorkerRef], int] = {}
        #: when workers were silent last
        self._spoke_ns: dict[WorkerRef, int] = {}

    def join(self, worker: WorkerRef, put: Put) -> None:
        """The worker, which is in the topology, can be reached from now on."""
        self._given_up.pop(worker, None)
        self._living[worker] = put

    def died(self, worker: WorkerRef) -> None:
        """The worker's process ended: if it was given up before, it learns nothing of that."""
        self.leave(worker)
        self._given_up.pop(worker, None)

    def leave(self, worker: WorkerRef) -> None:
        """The worker is given up."""
        put = self._living.pop(worker, None)
        if put is None:
            return
        self._serving.gone(worker)
        others = self._known.pop(worker, {})
        if worker in self._silent:
            self._given_up[worker] = put, tuple(others)
        for other in others:
            self._known.get(other, {}).pop(worker, None)
            self._clock.after(self._delay_ns(), partial(self._tell_lost, other, worker))

    def send(self, sender: WorkerRef, sent: TellPeer) -> None:
        """Queue a message behind those that the sender has sent the same peer before."""
        receiver = sent.peer
        if sender in self._given_up:
            self._clock.after(self._delay_ns(), partial(self._tell_given_up, sender, receiver))
            return
        if sender not in self._living:
            return
        if receiver not in self._living:
            self._clock.after(self._delay_ns(), partial(self._tell_lost, sender, receiver))
            return
        number = self._line(sender, sent)
        if number is None:
            return
        self._known.setdefault(sender, {})[receiver] = None
        self._known.setdefault(receiver, {})[sender] = None
        if isinstance(sent.message, Handover | Taken | KvLayer):
            self._hands(sender, receiver)
        left = partial(self._left, sender, sent, number)
        self._serving.send(sender, receiver, sent.size_bytes, left)

    def hold(self, worker: WorkerRef) -> None:
        """Nothing comes from the worker or reaches it from now on, and nothing is lost."""
        self._silent[worker] = None

    def go_on(self, worker: WorkerRef) -> None:
        """What was held up arrives, in order."""
        del self._silent[worker]
        self._spoke_ns[worker] = self._clock.now_ns
        held, self._held = self._held, []
        for sender, sent, number in held:
            self._arrive(sender, sent, number)
        if worker in self._given_up:
            for other in self._given_up[worker][1]:
                self._tell_given_up(worker, other)

    def free_ns(self, sender: WorkerRef) -> int:
        """Since when nothing of the worker is under way; now, if something is, or if it is
        silent."""
        if sender in self._silent:
            return self._clock.now_ns
        return max(self._serving.free_ns(sender), self._spoke_ns.get(sender, 0))

    # -- helpers --------------------------------------------------------------------------------

    def _line(self, sender: WorkerRef, sent: TellPeer) -> int | None:
        """How often the line had broken that the message goes over (None: it is broken now, and
        the sender learns that). Lines between ranks of one instance do not break."""
        if isinstance(sent.message, RankLayers):
            return _OF_RANKS
        until_ns = self._line_loss_ns()
        if until_ns is not None:
            self._break_line(sender, sent.peer, until_ns)
        number, until_ns = self._breaks.get(frozenset((sender, sent.peer)), (0, 0))
        if self._learned.get((sender, sent.peer), 0) < number:
            return None
        if self._clock.now_ns < until_ns:
            self._break_line(sender, sent.peer, until_ns)
            return None
        return number

    def _break_line(self, one: WorkerRef, other: WorkerRef, until_ns: int) -> None:
        """Both learn of it; what is under way between them is lost."""
        pair = frozenset((one, other))
        number = self._breaks.get(pair, (0, 0))[0] + 1
        self._breaks[pair] = (number, until_ns)
        for worker, lost in ((one, other), (other, one)):
            # What comes over a later line comes behind that.
            after_ns = self._last_ns.get((lost, worker), 0)
            self._last_ns[lost, worker] = max(after_ns, self._clock.now_ns + self._delay_ns())
            learns = partial(self._learns, worker, lost, number)
            self._clock.at(self._last_ns[lost, worker], learns)

    def _learns(self, worker: WorkerRef, lost: WorkerRef, number: int) -> None:
        self._learned[worker, lost] = number
        self._tell_lost(worker, lost)

    def _left(self, sender: WorkerRef, sent: TellPeer, number: int) -> None:
        """All of it has crossed the links."""
        pair = (sender, sent.peer)
        arrival_ns = max(self._last_ns.get(pair, 0), self._clock.now_ns + self._delay_ns())
        self._last_ns[pair] = arrival_ns
        self._clock.at(arrival_ns, partial(self._arrive, sender, sent, number))

    def _arrive(self, sender: WorkerRef, sent: TellPeer, number: int) -> None:
        receiver = sent.peer
        if number not in (_OF_RANKS, self._breaks.get(frozenset((sender, receiver)), (0, 0))[0]):
            return
        if sender in self._silent or receiver in self._silent:
            self._held.append((sender, sent, number))
            return
        put = self._living.get(receiver)
        if put is not None and sender in self._living:
            came_ns = self._clock.now_ns
            put(PeerSent(sender, sent.message, sent.gateways, sent.size_bytes, came_ns=came_ns))

    def _tell_lost(self, worker: WorkerRef, lost: WorkerRef) -> None:
        if worker in self._living:
            self._living[worker](PeerLost(lost))

    def _tell_given_up(self, worker: WorkerRef, lost: WorkerRef) -> None:
        """Not once it has joined anew: its connections are others then."""
        if worker in self._given_up:
            self._given_up[worker][0](PeerLost(lost))
