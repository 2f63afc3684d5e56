"""Members that send nothing for a while, NICs that are slow for a while, and who notices."""

from __future__ import annotations

from functools import partial

from livescale.member.inputs import FeedEnded
from livescale.sim.base.clock import Clock
from livescale.sim.links.flows import SimFlow
from livescale.sim.links.movement import Movement
from livescale.values.types import FromWorker, WorkerRef


class Slowdowns:
    """`stall_ns` is how long a receiver waits for bytes before it reports a stall."""

    def __init__(self, clock: Clock, moves: Movement, stall_ns: int) -> None:
        self._clock = clock
        self._moves = moves
        self._stall_ns = stall_ns
        #: members whose NICs are slow until then
        self._slow: dict[WorkerRef, int] = {}

    def freeze(self, member: WorkerRef, until_ns: int) -> None:
        """Nothing leaves the member until then, though its connections stand."""
        self._moves.frozen[member] = max(until_ns, self._moves.frozen.get(member, 0))
        self.expect_stalls(self._moves.sent_by(member))
        self._moves.touch_all(self._moves.sent_by(member))
        self._clock.at(until_ns, partial(self._thaw, member))

    def slow_nic(self, member: WorkerRef, permille: int, until_ns: int) -> None:
        """The member's NIC carries so much of its rate until then, both ways. With 0 nothing
        moves, which receivers notice as they notice a member that is frozen."""
        if until_ns <= self._clock.now_ns:
            return
        self._slow[member] = until_ns
        self._moves.set_nic(member, permille)
        if not permille:
            self.expect_stalls([*self._moves.received_by(member), *self._moves.sent_by(member)])
        self._clock.at(until_ns, partial(self._speed_up, member))

    def expect_stalls(self, flows: list[SimFlow]) -> None:
        """Those who get these bytes, maybe through others, say so if none come."""
        found = dict.fromkeys(flows)
        ahead = list(found)
        for flow in ahead:
            self._expect_stall(flow)
            for reader in self._moves.readers(flow.reception.key):
                if reader not in found:
                    found[reader] = None
                    ahead.append(reader)

    def begins(self, flow: SimFlow, sender: WorkerRef) -> None:
        """A flow that begins may wait from the start: for an end that is slow, or for a layer that
        was corrupt and that its sender has not verified."""
        ends = (sender, flow.reception.key[0])
        is_slow = any(member in self._moves.frozen or member in self._slow for member in ends)
        if is_slow or flow.reception.awaits_verified:
            self._expect_stall(flow)

    def _expect_stall(self, flow: SimFlow) -> None:
        upstream = flow.feed.upstream
        if not isinstance(upstream, FromWorker):
            return
        worker = upstream.worker
        flow.advance(self._clock.now_ns)
        before = flow.progress

        def look() -> None:
            if flow.is_over or flow.has_told_stall:
                return
            if flow.is_active or flow.progress != before:
                if flow.reception.awaits_verified:
                    self._expect_stall(flow)
                return
            if flow.next_wanted(0) is not None:
                flow.has_told_stall = True
                plan, tell = flow.reception.plan, flow.reception.tell
                tell(FeedEnded(plan, worker, "no bytes come", is_stalled=True))

        self._clock.after(self._stall_ns, look)

    def _thaw(self, member: WorkerRef) -> None:
        if self._moves.frozen.get(member) == self._clock.now_ns:
            del self._moves.frozen[member]
            self._moves.touch_all(self._moves.sent_by(member))

    def _speed_up(self, member: WorkerRef) -> None:
        if self._slow.get(member) == self._clock.now_ns:
            del self._slow[member]
            self._moves.set_nic(member, 1000)
