"""The router: holds the queue of every part of a model and hands requests to instances.

Requests wait here (ids and sizes only). Clients take turns, and of one client the first to come is
the first to go (`client_queues.py`). An instance holds at most `dispatched_ahead_max` requests that
it has not started, so that what waits can still go elsewhere; a loading one, which takes them for
its pair, at most `live_ahead_max`. While a part has several clients, none of them gets all places
of an instance: what the others send finds one that is free.
`assign` is synchronous, has no side effects outside, and may be called again after any change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from livescale.control.client_queues import ClientQueues, RecentClients
from livescale.routes import Route
from livescale.types import SEQUENCES_MAX, InstanceId, Part, RequestId, WorkerRef

_SPARED_SHARE = 8
"""Of the places of an instance every so many-th stays free of one client while there are others."""


@dataclass(slots=True)
class RequestRecord:
    """A request that has not ended. `worker` is set while an attempt is under way."""

    id: RequestId
    part: Part
    prompt_tokens: int
    output_tokens_max: int
    #: order of arrival: a retried request goes back to its place
    order: int
    #: who sent it, and how many requests a turn of that client is worth
    client: str = ""
    weight: int = 1
    attempt: int = 0
    #: how often the current attempt was taken over
    moves: int = 0
    worker: WorkerRef | None = None
    is_started: bool = False
    is_cancelled: bool = False
    #: attempts that came to nothing (one that was given back is none of them), and while it waits
    #: how the last one did
    failures: int = 0
    failure: str = ""
    #: a worker that the gateway could not reach, and until when it is left alone
    avoided: WorkerRef | None = None
    avoided_until_ns: int = 0


@dataclass(slots=True)
class _Row:
    """A route: `tokens` of prompts are outstanding on its `workers`, and `room` more requests can
    go there. `amount` is what it is chosen by among its like (thousandths of a token)."""

    instance: InstanceId
    workers: tuple[WorkerRef, ...]
    tokens: int
    room: int
    cost_permille: int
    lag_tokens: int
    amount: int = 0

    def __post_init__(self) -> None:
        self.add(0)

    @property
    def worker(self) -> WorkerRef:
        return self.workers[0]

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.amount = self.tokens * self.cost_permille + self.lag_tokens * 1000

    @property
    def until(self) -> int:
        """When it is done with all of it, as an amount: what runs while layers arrive is done soon
        after the last of them."""
        return max(self.tokens * self.cost_permille, self.lag_tokens * 1000)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The router's choice: this request's next attempt runs on that instance."""

    request: RequestRecord
    instance: InstanceId
    worker: WorkerRef


class Router:
    """Queue and whereabouts of all unfinished requests."""

    def __init__(
        self, dispatched_ahead_max: int, live_ahead_max: int = 8, places: int = SEQUENCES_MAX
    ) -> None:
        """An instance computes `places` requests at once."""
        self._ahead_max = dispatched_ahead_max
        self._live_ahead_max = live_ahead_max
        self._places = places
        self.requests: dict[RequestId, RequestRecord] = {}
        #: per part, waiting requests
        self._waiting: dict[Part, ClientQueues[RequestRecord]] = {}
        #: prompt tokens in `_waiting`, per part
        self._waiting_tokens: dict[Part, int] = {}
        #: per worker: dispatched and not ended
        self._dispatched: dict[WorkerRef, dict[RequestId, RequestRecord]] = {}
        #: per worker: of these, requests that it has not started, and the prompt tokens of all
        self._outstanding: dict[WorkerRef, list[int]] = {}
        #: per worker and client: how many of these
        self._held: dict[WorkerRef, dict[str, int]] = {}
        #: per part, the clients that sent something lately
        self._recent: dict[Part, RecentClients] = {}
        #: per part, requests that no instance had room for when they were last dealt out
        self._left_over: dict[Part, int] = {}
        #: per part, requests that are not over
        self._unfinished: dict[Part, int] = {}
        #: parts whose requests changed since that was last looked at
        self.touched: dict[Part, None] = {}
        self._arrivals = 0

    # -- what happened ----------------------------------------------------------------------

    def arrive(
        self,
        request: RequestId,
        part: Part,
        prompt_tokens: int,
        output_tokens_max: int,
        *,
        now_ns: int = 0,
        client: str = "",
        weight: int = 1,
    ) -> RequestRecord:
        """A new request waits behind those of its client."""
        assert request not in self.requests, f"{request} arrived twice"
        self._arrivals += 1
        record = RequestRecord(
            id=request,
            part=part,
            prompt_tokens=prompt_tokens,
            output_tokens_max=output_tokens_max,
            order=self._arrivals,
            client=client,
            weight=weight,
        )
        self.requests[request] = record
        self._unfinished[part] = self.unfinished(part) + 1
        self._recent.setdefault(part, RecentClients()).saw(client, now_ns)
        self._enqueue(record)
        return record

    def place(self, record: RequestRecord, worker: WorkerRef) -> None:
        """The request's attempt is under way on the worker."""
        self._dequeue(record, is_served=True)
        record.worker = worker
        self._dispatched.setdefault(worker, {})[record.id] = record
        outstanding = self._outstanding.setdefault(worker, [0, 0])
        outstanding[0] += not record.is_started
        outstanding[1] += record.prompt_tokens
        held = self._held.setdefault(worker, {})
        held[record.client] = held.get(record.client, 0) + 1

    def start(self, request: RequestId, attempt: int) -> None:
        """The instance admitted the request to its running batch."""
        record = self.requests.get(request)
        if record is not None and record.attempt == attempt and not record.is_started:
            record.is_started = True
            if record.worker is not None:
                self._outstanding[record.worker][0] -= 1

    def move(self, record: RequestRecord, worker: WorkerRef) -> None:
        """This worker has taken the current attempt over, wherever it was, and has started it."""
        if record.worker is not None:
            self._unplace(record)
        record.is_started = True
        self.place(record, worker)

    def retry(self, record: RequestRecord) -> None:
        """The attempt under way is over: the request waits again, at its old place."""
        self._unplace(record)
        self._enqueue(record)

    def end(self, record: RequestRecord) -> None:
        """The request is over, wherever it was."""
        if record.worker is None:
            self._dequeue(record)
        else:
            self._unplace(record)
        del self.requests[record.id]
        self._unfinished[record.part] -= 1
        self.touched[record.part] = None

    # -- what to do -------------------------------------------------------------------------

    def assign(self, now_ns: int, part: Part, routes: Iterable[Route]) -> list[Assignment]:
        """Hand waiting requests to routes with room, least outstanding work first.

        A loading instance that is alone gets those that would wait longer for the others, full or
        not.
        """
        queue = self._waiting.get(part)
        if not queue:
            return []
        rows = [self._row(route) for route in routes]
        assignments = self._deal(now_ns, queue, rows)
        self._left_over[part] = self.waiting(part)
        return assignments

    # -- what can be asked ------------------------------------------------------------------

    def waiting(self, part: Part) -> int:
        return len(self._waiting.get(part, ()))

    def waiting_of(self, part: Part) -> list[RequestRecord]:
        """The part's waiting requests, in order of arrival."""
        queue = self._waiting.get(part)
        records = [] if queue is None else list(queue.in_turn())
        return sorted(records, key=lambda record: record.order)

    def left_over(self, part: Part) -> int:
        """Waiting requests that no instance had room for when they were last dealt out."""
        return min(self._left_over.get(part, 0), self.waiting(part))

    def parts_waiting(self) -> list[Part]:
        """Parts that have requests waiting, in no order that means anything."""
        return list(self._waiting)

    def unfinished(self, part: Part) -> int:
        """Requests that wait or are dispatched."""
        return self._unfinished.get(part, 0)

    def waiting_tokens(self, part: Part) -> int:
        """Prompt tokens of the requests that wait for an instance."""
        return self._waiting_tokens.get(part, 0)

    def outstanding_tokens(self, worker: WorkerRef) -> int:
        """Prompt tokens of the requests that are under way on the worker."""
        return self._outstanding.get(worker, (0, 0))[1]

    def on_worker(self, worker: WorkerRef) -> list[RequestRecord]:
        """Requests whose attempt is under way on the worker, in order of dispatch."""
        return list(self._dispatched.get(worker, {}).values())

    def validate(self) -> None:
        """Every request waits or is dispatched, and the counts agree. Raises AssertionError."""
        seen: dict[RequestId, str] = {}
        for part, queue in self._waiting.items():
            records = list(queue.in_turn())
            for client in dict.fromkeys(record.client for record in records):
                orders = [record.order for record in records if record.client == client]
                assert orders == sorted(orders), f"queue of {client} to {part} is out of order"
            assert len(records) == len(queue)
            assert self._waiting_tokens[part] == sum(r.prompt_tokens for r in records)
            seen.update(dict.fromkeys((record.id for record in records), "waiting"))
        for worker, dispatched in self._dispatched.items():
            for request, record in dispatched.items():
                assert record.worker == worker, request
                assert request not in seen, request
                seen[request] = "dispatched"
            ahead = sum(1 for record in dispatched.values() if not record.is_started)
            tokens = sum(record.prompt_tokens for record in dispatched.values())
            assert self._outstanding[worker] == [ahead, tokens], worker
            assert self._held[worker] == Counter(r.client for r in dispatched.values()), worker
        assert sorted(seen) == sorted(self.requests)
        assert sum(self._unfinished.values()) == len(self.requests)

    # -- helpers ----------------------------------------------------------------------------

    def _deal(
        self, now_ns: int, queue: ClientQueues[RequestRecord], rows: list[_Row]
    ) -> list[Assignment]:
        assignments: list[Assignment] = []
        if not any(row.room > 0 for row in rows):
            return assignments
        recent = self._recent[next(queue.in_turn()).part]
        #: clients that hold as many places as they may
        sated: dict[str, None] = {}
        for record in queue.in_turn():
            if record.client in sated:
                continue
            shunned = record.avoided if now_ns < record.avoided_until_ns else None
            is_bounded = recent.has_others(record.client, now_ns)
            fitting = [r for r in rows if self._may_hold(r, record.client)] if is_bounded else rows
            row = _choose(fitting, shunned)
            if row is None:
                if shunned is None and not is_bounded:
                    break
                if shunned is None:
                    sated[record.client] = None
                continue
            row.add(record.prompt_tokens)
            if row.room <= 0:
                continue  # it waits for this one, and so do those behind it
            row.room -= 1
            record.attempt += 1
            record.moves = 0
            record.is_started = False
            record.failure = ""
            self.place(record, row.worker)
            assignments.append(Assignment(record, row.instance, row.worker))
        return assignments

    def _may_hold(self, row: _Row, client: str) -> bool:
        """The client does not have all places yet that it may have beside other clients."""
        most = max(1, self._places - max(1, self._places // _SPARED_SHARE)) * len(row.workers)
        return sum(self._held.get(worker, {}).get(client, 0) for worker in row.workers) < most

    def _row(self, route: Route) -> _Row:
        """What is outstanding, and what was not started, is that of all workers of the route."""
        first, workers = route.first, route.workers
        ahead, tokens = self._outstanding.get(first.worker, (0, 0))
        for worker in workers[1:]:
            more = self._outstanding.get(worker, (0, 0))
            ahead, tokens = ahead + more[0], tokens + more[1]
        return _Row(
            instance=first.instance,
            workers=workers,
            tokens=tokens,
            room=(self._live_ahead_max if route.is_live else self._ahead_max) - ahead,
            cost_permille=route.cost_permille,
            lag_tokens=route.lag_tokens,
        )

    def _enqueue(self, record: RequestRecord) -> None:
        self.touched[record.part] = None
        self._waiting.setdefault(record.part, ClientQueues()).add(record)
        tokens = self._waiting_tokens.get(record.part, 0)
        self._waiting_tokens[record.part] = tokens + record.prompt_tokens

    def _dequeue(self, record: RequestRecord, *, is_served: bool = False) -> None:
        queue = self._waiting.get(record.part)
        if queue is None or record not in queue:
            return
        if is_served:
            queue.serve(record)
        else:
            queue.remove(record)
        self.touched[record.part] = None
        self._waiting_tokens[record.part] -= record.prompt_tokens
        if not queue:
            del self._waiting[record.part]
            self._left_over.pop(record.part, None)

    def _unplace(self, record: RequestRecord) -> None:
        assert record.worker is not None
        del self._dispatched[record.worker][record.id]
        outstanding = self._outstanding[record.worker]
        outstanding[0] -= not record.is_started
        outstanding[1] -= record.prompt_tokens
        held = self._held[record.worker]
        held[record.client] -= 1
        if not held[record.client]:
            del held[record.client]
        if not held:
            del self._dispatched[record.worker], self._outstanding[record.worker]
            del self._held[record.worker]
        record.worker = None


def _choose(rows: list[_Row], shunned: WorkerRef | None) -> _Row | None:
    """The row for the next request; it may have no room: the request waits for it then."""
    ready = [row for row in rows if not row.lag_tokens]
    lagging = [row for row in rows if row.lag_tokens]
    row = _least(ready, shunned, 1)
    if lagging:
        row = row or _least(ready, shunned, None)
        later = _least(lagging, shunned, 1)
        if later is not None and (row is None or later.until < row.until):
            row = later
    return row


def _least(rows: Iterable[_Row], shunned: WorkerRef | None, room: int | None) -> _Row | None:
    """The row with the least amount, the lowest instance of equals. `room` (None: any) is what it
    must have at least."""
    fitting = (r for r in rows if r.worker != shunned and (room is None or r.room >= room))
    return min(fitting, key=lambda row: (row.amount, row.instance), default=None)
