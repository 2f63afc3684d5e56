"""How the lives of one process ended, and what follows: when the next one begins, and when there
is none. Pure: no clock, no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Before the pool was ready: what dies so often before it is ready needs a person to look.
_TRIALS_MAX = 3
# Afterwards a pool is not given up for a short time without memory, or a device being reset.
_LATER_TRIALS_MAX = 8
# A process that was ready is always replaced, but the sooner it dies again and again, the later.
_SHORT_LIFE_S = 10.0
_PAUSE_S = 0.1
_SHORT_LIFE_PAUSE_S_MAX = 5.0
_FAILED_START_PAUSE_S_MAX = 300.0


@dataclass(slots=True)
class Restarts:
    """One process and its successors."""

    name: str
    #: starts in a row that came to nothing, and lives in a row that were short
    failed_starts: int = 0
    short_lives: int = 0
    #: why the process says that it ends, and how the last life did (None: it never began)
    fatal: str | None = None
    exit_status: int | None = None

    def begins(self) -> None:
        """A new life."""
        self.fatal = None

    def ready(self) -> None:
        """The process has started."""
        self.failed_starts = 0

    def ended(self, exit_status: int | None, ready_s: float | None) -> None:
        """`ready_s` after it was ready, which it never was (None)."""
        self.exit_status = exit_status
        self.failed_starts += ready_s is None
        is_short = ready_s is None or ready_s < _SHORT_LIFE_S
        self.short_lives = self.short_lives + 1 if is_short else 0

    def could_not_begin(self, reason: str) -> None:
        """There is no process: the system gave none. It counts as a start that came to nothing."""
        self.fatal = reason
        self.ended(None, None)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next life: twice as long after each that failed."""
        if self.failed_starts:
            pause_s = _PAUSE_S * (1 << min(self.failed_starts - 1, 32))
            return min(pause_s, _FAILED_START_PAUSE_S_MAX)
        pause_s = _PAUSE_S * (1 << min(max(self.short_lives - 1, 0), 32))
        return min(pause_s, _SHORT_LIFE_PAUSE_S_MAX)

    def how_it_ended(self) -> str:
        """In words: "exit status 1", "killed by signal 9", with the reason where one is known."""
        status = self.exit_status
        if status is None:
            how = "no process began"
        elif status < 0:
            how = f"killed by signal {-status}"
        else:
            how = f"exit status {status}"
        return how if self.fatal is None else f"{how}: {self.fatal}"


def give_up_reason(ended: Restarts, peers: Sequence[Restarts], was_ready: bool) -> str | None:
    """Why a process that ended is not started again, and the pool ends (None: it goes on).

    `peers` are all processes that can do its work, itself included; `was_ready`: the pool was
    ready once. A pool that never was ends with the first known reason; one that was serves on with
    what is left, until that is nothing.
    """
    if not was_ready:
        if ended.failed_starts and ended.fatal is not None:
            return f"{ended.name} cannot start: {ended.fatal}"
        trials_max, peers = _TRIALS_MAX, [ended]
    else:
        trials_max = _LATER_TRIALS_MAX
    if any(peer.failed_starts < trials_max for peer in peers):
        return None
    reason = (
        f"{ended.name} failed {ended.failed_starts} times in a row before it was ready"
        f" ({ended.how_it_ended()}{'' if ended.fatal else '; see its log'})"
    )
    others = len(peers) - 1
    return reason if not others else f"{reason}; so did the other {others} of its kind"
