"""One direction of a connection: messages arrive in order, each after a delay, and then the end.

No message is looked at here, and nothing is decided about when a connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from livescale.sim.clock import Action, Clock

Message = TypeVar("Message")


class SimChannel(Generic[Message]):
    """Delivers what was sent, in order. `delay_ns` is drawn for every message."""

    def __init__(
        self, clock: Clock, delay_ns: Callable[[], int], deliver: Callable[[Message], None]
    ) -> None:
        self._clock = clock
        self._delay_ns = delay_ns
        self._deliver = deliver
        self._last_ns = 0
        #: messages sent later than this are lost (None: the channel is open)
        self._lost_after_ns: int | None = None
        #: what has come while nothing gets through (None: everything does)
        self._held: list[tuple[int, Message]] | None = None

    def send(self, message: Message) -> None:
        """Queue a message; a channel that was cut drops it."""
        if self._lost_after_ns is not None:
            return
        sent_ns = self._clock.now_ns
        self._last_ns = max(self._last_ns, sent_ns + self._delay_ns())
        self._clock.at(self._last_ns, lambda: self._arrive(sent_ns, message))

    def cut(self, lost_after_ns: int, at_end: Action | None = None) -> None:
        """Close: what was sent after `lost_after_ns` never arrives.

        `at_end` runs behind what still arrives.
        """
        if self._lost_after_ns is not None:
            return
        self._lost_after_ns = lost_after_ns
        if at_end is not None:
            self._last_ns = max(self._last_ns, self._clock.now_ns + self._delay_ns())
            self._clock.at(self._last_ns, at_end)

    def hold(self) -> None:
        """Nothing gets through from now on, and nothing is lost."""
        self._held = [] if self._held is None else self._held

    def go_on(self) -> None:
        """What was held up arrives, in order."""
        held, self._held = self._held or [], None
        for sent_ns, message in held:
            self._arrive(sent_ns, message)

    def _arrive(self, sent_ns: int, message: Message) -> None:
        if self._held is not None:
            self._held.append((sent_ns, message))
        elif self._lost_after_ns is None or sent_ns <= self._lost_after_ns:
            self._deliver(message)
