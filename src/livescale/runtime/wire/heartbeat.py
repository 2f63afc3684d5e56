"""Heartbeats: every member shows on every wire that it works, and closes wires that are silent.

A heartbeat is sent by the event loop that does the work. Where another thread works (workers and
agents) it is sent only while that thread makes progress. When a peer counts as lost is decided in
`control/cluster/liveness.py`; what follows is what follows from any wire that breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from livescale.control.cluster.liveness import SilenceWatch, WorkProgress, look_gap_ns
from livescale.runtime.wire.wire_channel import Wire
from livescale.values.units import NS_PER_MS

_log = logging.getLogger(__name__)
# A peer that has not sent anything yet may still be starting: its socket was there before it.
_FIRST_WORD_PERIODS = 12


class Heartbeats:
    """The wires of one event loop. Not thread-safe, except for `is_working`."""

    def __init__(self, lost_after_ms: int, is_working: Callable[[], bool] = lambda: True) -> None:
        """Nothing is sent while `is_working` says no: the wires stay, and their peers decide."""
        self.lost_after_ms = lost_after_ms
        self._is_working = is_working
        self._watch: SilenceWatch[Wire[Any]] = SilenceWatch(lost_after_ms * NS_PER_MS)

    def add(self, wire: Wire[Any]) -> None:
        """Watch the wire until it is closed, and send heartbeats on it. A peer that has sent
        nothing yet may take longer for its first message."""
        wire.notice_loss(self.lost_after_ms / 1000)
        patience_ns = self._watch.lost_after_ns * _FIRST_WORD_PERIODS
        self._watch.add(wire, time.monotonic_ns(), patience_ns)
        wire.beat()

    async def run(self) -> None:
        """Send and look, for ever."""
        gap_s = look_gap_ns(self._watch.lost_after_ns) / 1e9
        while True:
            self._look(time.monotonic_ns())
            await asyncio.sleep(gap_s)

    def _look(self, now_ns: int) -> None:
        is_working = self._is_working()
        for wire in self._watch.peers:
            if wire.is_closed:
                self._watch.remove(wire)
                continue
            if is_working:
                wire.beat()
            if wire.received_ns is not None:
                # While its last message is being dealt with, what came later lies unread.
                self._watch.received(wire, wire.received_ns if wire.is_waiting else now_ns)
        for wire in self._watch.look(now_ns):
            silent_ns = now_ns - (wire.received_ns or wire.opened_ns)
            wire.break_off(f"silent for {silent_ns / 1e9:.1f} s")

    def __repr__(self) -> str:
        return f"<Heartbeats of {len(self._watch.peers)} wires>"


class WorkPulse:
    """The progress of a thread with an inbox, for those who answer for it on other threads."""

    def __init__(
        self, lost_after_ms: int, stuck_after_ms: int, post: Callable[[Callable[[], None]], None]
    ) -> None:
        """`post` puts a piece of work into the inbox."""
        self._progress = WorkProgress(lost_after_ms * NS_PER_MS, stuck_after_ms * NS_PER_MS)
        self._post = post
        #: the thread that works, when it has begun
        self._thread: int | None = None
        self._is_told = False

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """One piece of work, on the thread that works."""
        self._thread = threading.get_ident()
        self._progress.begin(time.monotonic_ns())
        try:
            yield
        finally:
            self._progress.end(time.monotonic_ns())

    def go_on(self) -> None:
        """The piece under way is longer than what was seen of it: the thread has come round."""
        self._progress.begin(time.monotonic_ns())

    def pause(self) -> None:
        """The piece under way waits for what comes into the inbox, until it goes on."""
        self._progress.end(time.monotonic_ns())

    def is_working(self) -> bool:
        """Whether others may be told that the thread works. To be asked again and again, from any
        thread: between pieces the answer follows from whether the inbox is emptied. The log has
        where a thread is that does not go on."""
        now_ns = time.monotonic_ns()
        if self._progress.ask(now_ns):
            self._post(lambda: None)  # an empty piece of work
        is_alive = self._progress.is_alive(now_ns)
        if not is_alive and not self._is_told:
            _log.error("the work of this process does not go on:\n%s", self._stack())
        self._is_told = not is_alive
        return is_alive

    def _stack(self) -> str:
        """Of the thread that works."""
        frames = sys._current_frames()
        if self._thread not in frames:
            return "its thread has ended, or never began"
        return "".join(traceback.format_stack(frames[self._thread])).rstrip()
