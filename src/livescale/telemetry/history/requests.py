"""Follows requests from step to step: which wait, which run, and on which worker."""

from __future__ import annotations

from livescale.messages import commands, events
from livescale.values.types import RequestId, WorkerRef, gateway_of


class RequestsFollowed:
    """`running` are requests that were dispatched and have not ended, and where they are."""

    def __init__(self) -> None:
        self.running: dict[RequestId, WorkerRef] = {}
        #: requests that were never dispatched, with their model and the time of arrival
        self._waiting: dict[RequestId, tuple[str, int]] = {}

    def first_waiting(self, model: str) -> tuple[RequestId, int] | tuple[None, None]:
        """The request that waits longest for the model, and when it came."""
        waiting = self._waiting.items()
        return next(((r, at_ns) for r, (m, at_ns) in waiting if m == model), (None, None))

    def arrived(self, now_ns: int, event: events.RequestArrived) -> None:
        if event.worker is None:
            self._waiting[event.request] = (event.model, now_ns)
        else:
            self.running[event.request] = event.worker

    def dispatched(self, command: commands.Dispatch) -> None:
        self._waiting.pop(command.request, None)
        self.running[command.request] = command.worker

    def taken(self, event: events.BatchTaken) -> None:
        for request, *_ in event.requests:
            if request in self.running:
                self.running[request] = event.worker

    def over(
        self, message: events.RequestEnded | events.RequestCancelled | commands.FailRequest
    ) -> None:
        self.running.pop(message.request, None)
        # A request whose attempt has ended elsewhere may still wait.
        if not isinstance(message, events.RequestEnded):
            self._waiting.pop(message.request, None)

    def gateway_lost(self, event: events.GatewayLost) -> None:
        """All that it asked for is over."""
        known = (*self.running, *self._waiting)
        for request in [request for request in known if gateway_of(request) == event.gateway]:
            self.running.pop(request, None)
            self._waiting.pop(request, None)

    def lost(self, worker: WorkerRef) -> int:
        """Nothing runs there any more. Returns how many requests did."""
        requests = [request for request, place in self.running.items() if place == worker]
        for request in requests:
            del self.running[request]
        return len(requests)
