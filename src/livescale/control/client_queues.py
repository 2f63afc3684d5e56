"""The waiting requests of one part, a queue for each client: who is served next.

Weighted round robin: clients take turns, and a turn is worth `weight` requests. So a request waits
for one turn of each other client at most, however many requests another one has sent. Among those
of one client the first to come is the first to go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from livescale.types import RequestId

REMEMBERED_NS = 60_000_000_000
"""A client counts as one of a part's for so long after its last request came."""
_CLIENTS_MAX = 4096


class Waiting(Protocol):
    """What the queues need to know of a request."""

    @property
    def id(self) -> RequestId: ...
    @property
    def client(self) -> str: ...
    @property
    def weight(self) -> int: ...
    @property
    def order(self) -> int: ...


Record = TypeVar("Record", bound=Waiting)


@dataclass(slots=True)
class _Turn(Generic[Record]):
    """A client's requests in order of arrival, and how many of its turn are used up."""

    records: dict[RequestId, Record] = field(default_factory=dict)
    used: int = 0


class ClientQueues(Generic[Record]):
    """Requests that wait. The client whose turn it is comes first."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn[Record]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, record: Record) -> bool:
        turn = self._turns.get(record.client)
        return turn is not None and record.id in turn.records

    def add(self, record: Record) -> None:
        """The request waits, in the place that its `order` gives it among those of its client. A
        client that has none waiting gets its turn after all others."""
        records = self._turns.setdefault(record.client, _Turn()).records
        is_last = not records or next(reversed(records.values())).order < record.order
        records[record.id] = record
        self._count += 1
        if not is_last:
            by_order = sorted(records.values(), key=lambda waiting: waiting.order)
            self._turns[record.client].records = {waiting.id: waiting for waiting in by_order}

    def remove(self, record: Record) -> None:
        """The request waits no longer; its client's turn is as it was."""
        records = self._turns[record.client].records
        del records[record.id]
        self._count -= 1
        if not records:
            del self._turns[record.client]

    def serve(self, record: Record) -> None:
        """The request is served: it counts for its client's turn, which may be over by that."""
        turn = self._turns[record.client]
        turn.used += 1
        if turn.used >= record.weight:
            turn.used = 0
            self._turns[record.client] = self._turns.pop(record.client)
        self.remove(record)

    def in_turn(self) -> Iterator[Record]:
        """All requests as they would be served, as of now; they may be served meanwhile."""
        left = deque((iter(list(t.records.values())), t.used) for t in self._turns.values())
        while left:
            records, used = left.popleft()
            first = next(records, None)
            if first is None:
                continue
            yield first
            yield from islice(records, max(first.weight - used - 1, 0))
            left.append((records, 0))

    def __repr__(self) -> str:
        return f"<ClientQueues {self._count} requests of {len(self._turns)} clients>"


class RecentClients:
    """The clients that sent requests to one model lately; the oldest of very many are forgotten."""

    def __init__(self) -> None:
        #: when each sent its last one, the longest ago first
        self._seen_ns: dict[str, int] = {}

    def saw(self, client: str, now_ns: int) -> None:
        """The client sends a request now."""
        self._seen_ns.pop(client, None)
        self._seen_ns[client] = now_ns
        if len(self._seen_ns) > _CLIENTS_MAX:
            del self._seen_ns[next(iter(self._seen_ns))]

    def has_others(self, client: str, now_ns: int) -> bool:
        """Some other client sent a request lately."""
        while self._seen_ns:
            oldest = next(iter(self._seen_ns))
            if self._seen_ns[oldest] > now_ns - REMEMBERED_NS:
                break
            del self._seen_ns[oldest]
        return len(self._seen_ns) > (client in self._seen_ns)
