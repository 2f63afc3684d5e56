"""A member's way to the controller on which progress may be lost though the connection stands.

Terminal events, joins and troubles are never lost, only late: senders keep them until they were
delivered. Progress may be overtaken. A layer's arrival is not said again, because the load's end
says it; an instance's report makes way for a newer one, and comes late if there is none, as from a
sender that keeps only the last word.
"""

from __future__ import annotations

from collections.abc import Callable

from livescale.messages.events import AnyEvent, InstanceReported, LayerArrived
from livescale.sim.clock import Clock
from livescale.sim.links.channel import SimChannel

_SAID_AGAIN_NS = 50_000_000


class LossyChannel(SimChannel[AnyEvent]):
    """`loses` is asked for every progress message."""

    def __init__(
        self,
        clock: Clock,
        delay_ns: Callable[[], int],
        deliver: Callable[[AnyEvent], None],
        loses: Callable[[], bool],
    ) -> None:
        super().__init__(clock, delay_ns, deliver)
        self._loses = loses
        self._reports = 0

    def send(self, message: AnyEvent) -> None:
        """Queue a message, or lose it."""
        if isinstance(message, LayerArrived) and self._loses():
            return
        if isinstance(message, InstanceReported):
            self._reports += 1
            number = self._reports
            if self._loses():
                self._clock.after(_SAID_AGAIN_NS, lambda: self._say_again(number, message))
                return
        super().send(message)

    def _say_again(self, number: int, report: InstanceReported) -> None:
        if number == self._reports:
            super().send(report)
