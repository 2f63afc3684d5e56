"""Who is alive: silence of peers as a watcher judges it, and progress of a thread that works.

A watcher knows only what it received and when it looked. One that was late itself (the machine was
suspended, or too busy) cannot tell silence from its own absence: it begins to count anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)

_LOOKS_PER_PERIOD = 5


def look_gap_ns(lost_after_ns: int) -> int:
    """How often a member shows that it is alive, and how often a watcher looks."""
    return max(1, lost_after_ns // _LOOKS_PER_PERIOD)


@dataclass(slots=True)
class _Record:
    """Since when a peer is silent, and for how long it may be."""

    silent_since_ns: int
    patience_ns: int


class SilenceWatch(Generic[Peer]):
    """One watcher's peers. A peer is lost when it was silent for `lost_after_ns` while the watcher
    looked in time."""

    def __init__(self, lost_after_ns: int) -> None:
        self.lost_after_ns = lost_after_ns
        self._last_look_ns: int | None = None
        self._records: dict[Peer, _Record] = {}

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Those that are watched."""
        return tuple(self._records)

    def add(self, peer: Peer, now_ns: int, patience_ns: int | None = None) -> None:
        """Watch the peer. Until it is received from for the first time it may be silent for
        `patience_ns` (None: no longer than later)."""
        self._records[peer] = _Record(now_ns, patience_ns or self.lost_after_ns)

    def received(self, peer: Peer, at_ns: int) -> None:
        """The peer was not silent at this time. Nothing happens for one that is not watched."""
        record = self._records.get(peer)
        if record is not None and at_ns >= record.silent_since_ns:
            record.silent_since_ns = at_ns
            record.patience_ns = self.lost_after_ns

    def remove(self, peer: Peer) -> None:
        """The peer has gone in another way. Nothing happens for one that is not watched."""
        self._records.pop(peer, None)

    def look(self, now_ns: int) -> tuple[Peer, ...]:
        """The peers that are lost now, in the order in which they were added; each is told once.

        To be called every `look_gap_ns`.
        """
        last_ns, self._last_look_ns = self._last_look_ns, now_ns
        if last_ns is not None and now_ns - last_ns > self.lost_after_ns // 2:
            # What was sent meanwhile may lie unread: no peer is judged by the time of absence.
            for record in self._records.values():
                record.silent_since_ns = max(record.silent_since_ns, now_ns)
            return ()
        lost = tuple(
            peer
            for peer, record in self._records.items()
            if now_ns - record.silent_since_ns >= record.patience_ns
        )
        for peer in lost:
            del self._records[peer]
        return lost

    def __repr__(self) -> str:
        return f"<SilenceWatch of {len(self._records)} peers>"


class WorkProgress:
    """Whether a thread that takes up one piece of work after the other still does.

    That thread calls `begin` and `end` around every piece, those who answer for it ask `is_alive`.
    A thread that is in no piece waits for one; to see that it does, it is given an empty piece.
    """

    def __init__(self, lost_after_ns: int, stuck_after_ns: int) -> None:
        """A piece may take `stuck_after_ns`; between pieces nothing takes `lost_after_ns`."""
        self._lost_after_ns = lost_after_ns
        self._piece_max_ns = max(stuck_after_ns, lost_after_ns)
        # Written by the working thread, each by one assignment: no lock is needed.
        self._began_ns: int | None = None
        #: when an empty piece was asked for that has not been taken up (None: there is none)
        self._asked_ns: int | None = None

    def begin(self, now_ns: int) -> None:
        """A piece of work is taken up. Whatever was asked of the thread, it has come round."""
        self._began_ns = now_ns
        self._asked_ns = None

    def end(self, now_ns: int) -> None:
        """It is done. A piece that waits may wait from now on."""
        self._began_ns = None
        if self._asked_ns is not None:
            self._asked_ns = now_ns

    def ask(self, now_ns: int) -> bool:
        """Whether the thread must be given an empty piece now: the last one was taken up."""
        if self._asked_ns is not None:
            return False
        self._asked_ns = now_ns
        return True

    def is_alive(self, now_ns: int) -> bool:
        """The thread works on a piece that is not too old, or takes up the next one in time."""
        began_ns, asked_ns = self._began_ns, self._asked_ns
        if began_ns is not None:
            return now_ns - began_ns < self._piece_max_ns
        return asked_ns is None or now_ns - asked_ns < self._lost_after_ns
