"""One direction of a connection: messages arrive in order, each after a delay, and then the end.

Nothing is decided here about when a connection breaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

from livescale.messages.epochs import Fenced
from livescale.messages.events import AnyEvent, InstanceReported, LayerArrived
from livescale.sim.base.clock import Action, Clock
from livescale.sim.base.config import SimConfig

Message = TypeVar("Message")
_SENT_AGAIN_NS = 50_000_000


class Delays:
    """What happens to messages on their way, drawn from a seed: a constant delay, and now and then
    more."""

    def __init__(self, config: SimConfig, clock: Clock, seed: int) -> None:
        self._clock = clock
        self._faults = config.faults
        self._message_delay_ns = config.message_delay_ns
        self._rng = random.Random(f"delays {seed}")
        self._losses = random.Random(f"lost messages {seed}")
        self._pairs = random.Random(f"lost pairs {seed}")
        self._lines = random.Random(f"lost lines {seed}")

    def plain_ns(self) -> int:
        return self._message_delay_ns

    def of_worker_ns(self) -> int:
        """The delay of a worker's message: late ones happen while faults do."""
        faults = self._faults
        if (
            self._clock.now_ns < faults.until_ns
            and self._rng.randrange(1000) < faults.late_permille
        ):
            return self._message_delay_ns + self._rng.randrange(faults.late_ns_max + 1)
        return self._message_delay_ns

    def loses(self) -> bool:
        """A progress message of this time is lost."""
        return self._happens(self._losses, self._faults.lost_permille)

    def loss_window_ns(self) -> int:
        """How much of what a dying worker last sent is lost."""
        return self._rng.randrange(2 * self._message_delay_ns + 1)

    def pair_loss(self) -> tuple[int, int] | None:
        """Whether a handover of this time loses one of its two workers: which, and how soon."""
        faults = self._faults
        if not self._happens(self._pairs, faults.pair_loss_permille):
            return None
        soon_ns = 2 * self._message_delay_ns + self._pairs.choice([1, faults.late_ns_max + 1])
        return self._pairs.randrange(2), self._pairs.randrange(soon_ns)

    def line_loss_ns(self) -> int | None:
        """If a message of this time breaks the line between its two workers: until when."""
        faults = self._faults
        if not self._happens(self._lines, faults.line_loss_permille):
            return None
        return min(self._clock.now_ns + faults.link_ns, faults.until_ns)

    def reconnect_ns(self) -> int:
        """How long a peer takes to find a controller that has just begun."""
        return self._rng.randint(1, self._faults.reconnect_ns_max)

    def _happens(self, rng: random.Random, permille: int) -> bool:
        """To so many of 1000, while faults happen."""
        if self._clock.now_ns >= self._faults.until_ns or not permille:
            return False
        return rng.randrange(1000) < permille


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


class LossyChannel(SimChannel[AnyEvent | Fenced]):
    """A member's way to the controller on which progress may be lost though the connection stands.
    `loses` is asked for every progress message.

    Terminal events, joins and troubles are never lost, only late: senders keep them until they were
    delivered. Progress may be overtaken. A layer's arrival is not sent again, because the end of
    the load reports it; an instance's report makes way for a newer one, and comes late if there is
    none, as from a sender that keeps only the last one.
    """

    def __init__(
        self,
        clock: Clock,
        delay_ns: Callable[[], int],
        deliver: Callable[[AnyEvent | Fenced], None],
        loses: Callable[[], bool],
    ) -> None:
        super().__init__(clock, delay_ns, deliver)
        self._loses = loses
        self._reports = 0

    def send(self, message: AnyEvent | Fenced) -> None:
        """Queue a message, or lose it."""
        if isinstance(message, LayerArrived) and self._loses():
            return
        if isinstance(message, InstanceReported):
            self._reports += 1
            number = self._reports
            if self._loses():
                self._clock.after(_SENT_AGAIN_NS, lambda: self._send_again(number, message))
                return
        super().send(message)

    def _send_again(self, number: int, report: InstanceReported) -> None:
        if number == self._reports:
            super().send(report)
