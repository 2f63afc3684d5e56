"""Members that fall silent: nothing comes from them and nothing reaches them, for a while.

They were stopped, or their link was cut without a word; what they do meanwhile is not seen. Their
watchers (controller, gateway and supervisor) judge them by the rules of a real pool
(`control/cluster/liveness.py`), each at times of its own. What a verdict means is the world's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from livescale.control.cluster.liveness import SilenceWatch, look_gap_ns
from livescale.member.inputs import receiver_of
from livescale.messages.commands import AnyCommand, Dispatch, DropHolding, SetCores, StartHolding
from livescale.sim.base.clock import Clock
from livescale.sim.checkers.invariants import require
from livescale.values.types import WorkerRef


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who looks after members. `members` are those that it has a connection with now; it sees that
    a process was stopped, and, unless `is_local`, that a link was cut."""

    name: str
    members: Callable[[], Sequence[WorkerRef]]
    give_up: Callable[[WorkerRef], None]
    is_local: bool = False


class Silences:
    """Who is silent since when, over all lives of the controller, and when that must be noticed."""

    def __init__(
        self, clock: Clock, lost_after_ns: int, until_ns: int, goes_on: Callable[[WorkerRef], None]
    ) -> None:
        """Watchers look until a while after `until_ns`; `goes_on` is called for a member whose
        silence is over."""
        self._clock = clock
        self._lost_after_ns = lost_after_ns
        self._end_ns = until_ns + 4 * lost_after_ns
        self._goes_on = goes_on
        #: since when, and whether the process was stopped
        self._silent: dict[WorkerRef, tuple[int, bool]] = {}

    def watch(self, watcher: Watcher, phase_ns: int) -> None:
        """The watcher looks again and again from now on, first after `phase_ns`."""
        watch: SilenceWatch[WorkerRef] = SilenceWatch(self._lost_after_ns)
        self._clock.after(phase_ns, partial(self._look, watcher, watch))

    def begin(self, member: WorkerRef, silent_ns: int, *, is_stopped: bool) -> None:
        """The member is silent from now on."""
        if member not in self._silent:
            self._silent[member] = self._clock.now_ns, is_stopped
            self._clock.after(silent_ns, partial(self._end, member))

    def is_silent(self, member: WorkerRef) -> bool:
        return member in self._silent

    def died(self, member: WorkerRef) -> None:
        """The member is no longer silent but dead: the news of that is on its way."""
        self._silent.pop(member, None)

    def _end(self, member: WorkerRef) -> None:
        if self._silent.pop(member, None) is not None:
            self._goes_on(member)

    def _look(self, watcher: Watcher, watch: SilenceWatch[WorkerRef]) -> None:
        now_ns = self._clock.now_ns
        members = watcher.members()
        for known in watch.peers:
            if known not in members:
                watch.remove(known)
        for member in members:
            if member not in watch.peers:
                watch.add(member, now_ns)
            watch.received(member, self._last_word_ns(watcher, member))
        for member in watch.look(now_ns):
            since_ns = self._last_word_ns(watcher, member)
            is_due = now_ns - since_ns >= self._lost_after_ns
            require(is_due, "only the silent are given up", watcher.name, member, since_ns, now_ns)
            watcher.give_up(member)
        if now_ns < self._end_ns:
            gap_ns = look_gap_ns(self._lost_after_ns)
            self._clock.after(gap_ns, partial(self._look, watcher, watch))

    def _last_word_ns(self, watcher: Watcher, member: WorkerRef) -> int:
        """When the watcher last received something from the member."""
        now_ns = self._clock.now_ns
        since_ns, is_stopped = self._silent.get(member, (now_ns, False))
        return since_ns if is_stopped or not watcher.is_local else now_ns

    # -- the rule -------------------------------------------------------------------------------

    def ordered(self, commands: Sequence[AnyCommand], met_ns: int) -> None:
        """A life of the controller orders this (see `require_noticed`)."""
        for command in commands if self._silent else ():
            if isinstance(command, Dispatch):
                self.require_noticed(command.worker, met_ns, command)
            elif isinstance(command, StartHolding | DropHolding | SetCores):
                self.require_noticed(receiver_of(command), met_ns, command)

    def require_noticed(self, member: WorkerRef, met_ns: int, what: object) -> None:
        """The member gets this, or keeps it, from one who has met it at `met_ns` at the earliest:
        it has not been silent for too long."""
        if member not in self._silent:
            return
        since_ns = max(self._silent[member][0], met_ns)
        limit_ns = self._lost_after_ns + 2 * look_gap_ns(self._lost_after_ns)
        is_noticed = self._clock.now_ns - since_ns <= limit_ns
        require(is_noticed, "silence is noticed in time", member, since_ns, what)
