"""When a controller's next step is due, and with which events: the same in a pool and simulated."""

from __future__ import annotations

from livescale.messages.events import AnyEvent, Tick


class NextStep:
    """Of one life of the controller. A step is due as soon as an event waits, or at the earliest
    time that a WakeAt asked for, and not before `gap_ns` have passed since the last one.

    A WakeAt that is later than one that waits is dropped: the controller asks again in the step
    that the earlier one brings. Each step from its time on is the call that was asked for, whatever
    else has brought it.
    """

    def __init__(self, gap_ns: int) -> None:
        self._gap_ns = gap_ns
        self._earliest_ns = 0
        self._events: list[AnyEvent] = []
        self._wake_at_ns: int | None = None

    @property
    def due_ns(self) -> int | None:
        """When the step is due, maybe in the past (None: not yet known). Only `push` and `wake_at`
        make that earlier, and where an event waits nothing does."""
        if self._events:
            return self._earliest_ns
        return None if self._wake_at_ns is None else max(self._wake_at_ns, self._earliest_ns)

    def push(self, event: AnyEvent) -> None:
        """The event is for the next step."""
        self._events.append(event)

    def wake_at(self, at_ns: int) -> None:
        """A step is asked for at this time."""
        self._wake_at_ns = at_ns if self._wake_at_ns is None else min(at_ns, self._wake_at_ns)

    def begin(self, now_ns: int) -> list[AnyEvent]:
        """The step, which is due, begins: its events, in the order in which they came, or a Tick if
        nothing but the time has brought it."""
        absorbed, self._events = self._events or [Tick()], []
        self._earliest_ns = now_ns + self._gap_ns
        if self._wake_at_ns is not None and self._wake_at_ns <= now_ns:
            self._wake_at_ns = None
        return absorbed

    def __repr__(self) -> str:
        return f"<NextStep at {self.due_ns} ns with {len(self._events)} events>"
