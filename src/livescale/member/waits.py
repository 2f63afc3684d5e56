"""How long the requests of a gateway may wait for a worker: the same in a pool and simulated."""

from __future__ import annotations

from collections import OrderedDict

from livescale.values.types import RequestId


class Waits:
    """Requests that no worker has. All may wait for equally long at a stretch, so the wait that
    began first ends first. All calls take O(1)."""

    def __init__(self, longest_ns: int | None) -> None:
        """None: a wait has no end."""
        self._longest_ns = longest_ns
        self._ends_ns: OrderedDict[RequestId, int] = OrderedDict()

    @property
    def next_ns(self) -> int | None:
        """When the next wait ends (None: none does)."""
        return next(iter(self._ends_ns.values()), None)

    def begin(self, request: RequestId, now_ns: int) -> None:
        """The request, which did not wait, waits from now on."""
        if self._longest_ns is not None:
            self._ends_ns[request] = now_ns + self._longest_ns

    def end(self, request: RequestId) -> None:
        """A worker has the request, or it is over."""
        self._ends_ns.pop(request, None)

    def take_over(self, now_ns: int) -> RequestId | None:
        """The request whose wait has ended first by now (None: no one's has). It is given once."""
        end_ns = self.next_ns
        if end_ns is None or end_ns > now_ns:
            return None
        return self._ends_ns.popitem(last=False)[0]

    def __repr__(self) -> str:
        return f"<Waits of {len(self._ends_ns)} requests, the next one ends at {self.next_ns} ns>"
