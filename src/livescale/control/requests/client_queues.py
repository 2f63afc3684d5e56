"""The waiting requests of one part, a queue for each client: who is served next.

Weighted round robin: clients take turns, and a turn is worth `weight` requests. So a request waits
for one turn of each other client at most, however many requests another one has sent. Those of one
client go as prompts share Runs (`batching/runs/choosing.py`): in each the first to come gets up to
a share of the tokens, and the shortest the rest. Where times to the first token are promised, those
that have waited too long for that leave the shortest's part and half of the first one's to others:
a burst that is late already makes nothing late that comes after it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from livescale.values.types import RequestId

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
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def late_ns(self) -> int | None:
        """From when on it waits too long for what is promised (None: nothing is)."""


Record = TypeVar("Record", bound=Waiting)


@dataclass(frozen=True, slots=True)
class QueueShares:
    """Which of a client's requests goes next: as if it had Runs of `run_tokens`, of which the one
    that came first gets up to `oldest_percent`, and the shortest ones the rest. `passes_max`
    requests, at most, are served before one that came earlier."""

    oldest_percent: int = 100
    passes_max: int = 1 << 62
    run_tokens: int = 2048

    def left_of_runs(self, prompt_tokens: int) -> int:
        """Tokens that the first one leaves to others in the Runs that compute it."""
        share = -(-self.run_tokens * self.oldest_percent // 100)
        return -(-prompt_tokens // share) * self.run_tokens - prompt_tokens


_Size = tuple[int, int, RequestId]
"""Prompt tokens, order and id of a request: the shortest first."""


class _Order(Generic[Record]):
    """One order of requests, of which some are picked by another one meanwhile."""

    def __init__(self, records: Iterable[Record], picked: Container[RequestId] = ()) -> None:
        self._records, self._picked = iter(records), picked
        self._head: Record | None = None

    def head(self) -> Record | None:
        """The first that was not picked."""
        while self._head is None or self._head.id in self._picked:
            self._head = next(self._records, None)
            if self._head is None:
                return None
        return self._head


class _Turn(Generic[Record]):
    """A client's requests in order of arrival, and how many of its turn are used up."""

    def __init__(self) -> None:
        self.records: dict[RequestId, Record] = {}
        self.used = 0
        #: with shares only: the same requests by size, and what `overtakes` was when each came
        self.sizes: list[_Size] = []
        self.met: dict[RequestId, int] = {}
        #: requests that were served though an earlier one waited
        self.overtakes = 0
        #: tokens that the last of the oldest left to the shortest: above 0 it is their turn
        self.left_tokens = 0
        #: how often it was the turn of the oldest: every second time one that is late may go
        self.oldest_turns = 0

    def timely(self, now_ns: int) -> Iterator[Record]:
        """Those that are not late, in order of arrival."""
        return (record for record in self.records.values() if not _is_late(record, now_ns))

    def is_of_oldest(self, record: Record, oldest: Record, timely: Record | None) -> bool:
        """The request goes as the oldest does, or as the oldest that is not late."""
        return record is oldest or (record is timely and self.left_tokens <= 0)

    def count(self, record: Record, oldest: Record, timely: Record | None, left: int) -> None:
        """The request is served, and leaves so many tokens to the shortest if it goes as the
        oldest."""
        if self.is_of_oldest(record, oldest, timely):
            self.left_tokens = min(self.left_tokens, 0) + left
            self.oldest_turns += 1
        else:
            self.left_tokens -= record.prompt_tokens
        self.overtakes += record is not oldest

    def picks(self, sharing: QueueShares, now_ns: int) -> Iterator[Record]:
        """All requests as they would be served, as of now; they may be served meanwhile."""
        if sharing.oldest_percent == 100:
            yield from list(self.records.values())
            return
        ahead = self._copy()
        picked: dict[RequestId, None] = {}
        by_size = [ahead.records[name] for *_, name in self.sizes]
        timely_by_size = (record for record in by_size if not _is_late(record, now_ns))
        ages, shortest = _Order(ahead.records.values(), picked), _Order(by_size, picked)
        timely, timely_shortest = (
            _Order(ahead.timely(now_ns), picked),
            _Order(timely_by_size, picked),
        )
        while (oldest := ages.head()) is not None:
            first, record = timely.head(), oldest
            is_due = ahead.overtakes - ahead.met[oldest.id] >= sharing.passes_max
            if ahead.left_tokens > 0 and not is_due:
                record = timely_shortest.head() or shortest.head() or oldest
            elif ahead.oldest_turns % 2 == 0 and not is_due:
                record = first or oldest
            picked[record.id] = None
            ahead.count(record, oldest, first, sharing.left_of_runs(record.prompt_tokens))
            yield record

    def _copy(self) -> _Turn[Record]:
        copy: _Turn[Record] = _Turn()
        copy.records, copy.met = dict(self.records), dict(self.met)
        copy.overtakes, copy.left_tokens = self.overtakes, self.left_tokens
        copy.oldest_turns = self.oldest_turns
        return copy


class ClientQueues(Generic[Record]):
    """Requests that wait. The client whose turn it is comes first."""

    def __init__(self, sharing: QueueShares | None = None) -> None:
        """By default those of a client are served in order of arrival."""
        self._sharing = sharing or QueueShares()
        self._turns: dict[str, _Turn[Record]] = {}
        self._count = 0
        #: as of when requests are late
        self.now_ns = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        """All requests; those of one client are in order of arrival."""
        for turn in self._turns.values():
            yield from turn.records.values()

    def __contains__(self, record: Record) -> bool:
        turn = self._turns.get(record.client)
        return turn is not None and record.id in turn.records

    def add(self, record: Record) -> None:
        """The request waits, in the place that its `order` gives it among those of its client. A
        client that has none waiting gets its turn after all others."""
        turn = self._turns.setdefault(record.client, _Turn())
        records = turn.records
        is_last = not records or next(reversed(records.values())).order < record.order
        records[record.id] = record
        self._count += 1
        turn.met[record.id] = turn.overtakes
        insort(turn.sizes, _size(record))
        if not is_last:
            by_order = sorted(records.values(), key=lambda waiting: waiting.order)
            turn.records = {waiting.id: waiting for waiting in by_order}
            # No later one may be due before it: then none could go.
            later = next(other for other in by_order if other.order > record.order)
            turn.met[record.id] = turn.met[later.id]

    def remove(self, record: Record) -> None:
        """The request waits no longer; its client's turn is as it was."""
        turn = self._turns[record.client]
        del turn.records[record.id], turn.met[record.id]
        del turn.sizes[bisect_left(turn.sizes, _size(record))]
        self._count -= 1
        if not turn.records:
            del self._turns[record.client]

    def serve(self, record: Record) -> None:
        """The request is served: it counts for its client's turn, which may be over by that."""
        turn = self._turns[record.client]
        oldest, timely = next(iter(turn.records.values())), next(turn.timely(self.now_ns), None)
        turn.count(record, oldest, timely, self._sharing.left_of_runs(record.prompt_tokens))
        turn.used += 1
        if turn.used >= record.weight:
            turn.used = 0
            self._turns[record.client] = self._turns.pop(record.client)
        self.remove(record)

    def in_turn(self, sated: Container[str] = ()) -> Iterator[Record]:
        """All requests as they would be served, as of now; they may be served meanwhile. Nothing
        more comes of clients that are `sated`, which may become more meanwhile."""
        now_ns, turns = self.now_ns, list(self._turns.items())
        left = deque((c, t.picks(self._sharing, now_ns), t.used) for c, t in turns)
        while left:
            client, records, used = left.popleft()
            first = None if client in sated else next(records, None)
            if first is None:
                continue
            yield first
            for record in islice(records, max(first.weight - used - 1, 0)):
                if client in sated:
                    break
                yield record
            left.append((client, records, 0))

    def due_before(self, record: Record) -> Record | None:
        """The request of the same client that came first, if it was passed as often as may be:
        then no later one goes before it."""
        turn = self._turns[record.client]
        oldest = next(iter(turn.records.values()))
        is_due = turn.overtakes - turn.met[oldest.id] >= self._sharing.passes_max
        return oldest if is_due and oldest is not record else None

    def __repr__(self) -> str:
        return f"<ClientQueues {self._count} requests of {len(self._turns)} clients>"


def _size(record: Waiting) -> _Size:
    return record.prompt_tokens, record.order, record.id


def _is_late(record: Waiting, now_ns: int) -> bool:
    return record.late_ns is not None and now_ns >= record.late_ns


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
