"""The router: holds the queue of every part of a model and hands requests to instances.

Requests wait here (ids and sizes only). Clients take turns, and of one client the first to come and
the shortest share the tokens (`client_queues.py`). With late binding an instance holds what it
computes next, about two Runs of prompt tokens, and at most `dispatched_ahead_max` requests that
have not started (that have no token yet), so that what waits can still go elsewhere; a loading one,
which takes them for its pair, at most `live_ahead_max` that it has not admitted. With early binding
an instance gets what its KV has room for (`values/bindings.py`). While a part has several clients,
none of them gets all places of an instance: what the others send finds one that is free.
`assign` is synchronous, has no side effects outside, and may be called again after any change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from livescale.control.requests.client_queues import ClientQueues, QueueShares, RecentClients
from livescale.control.requests.router_rows import (
    Outstanding,
    RequestRecord,
    RouteRow,
    RowLimits,
    bound_rows,
    choose_row,
    empty_rows,
)
from livescale.messages.events import InstanceReported
from livescale.values.bindings import Binding, EarlyBinding, LateBinding
from livescale.values.routes import Route
from livescale.values.types import SEQUENCES_MAX, InstanceId, Part, RequestId, WorkerRef

_SPARED_SHARE = 8
"""Of the places of an instance every so many-th stays free of one client while there are others."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The router's choice: this request's next attempt runs on that instance."""

    request: RequestRecord
    instance: InstanceId
    worker: WorkerRef


class ClientShare(NamedTuple):
    """Who asks, and how many turns it has where others have one."""

    name: str
    weight: int = 1


_NOBODY = ClientShare("")


class Router:
    """Queue and whereabouts of all unfinished requests."""

    def __init__(
        self,
        dispatched_ahead_max: int,
        live_ahead_max: int = 8,
        places: int = SEQUENCES_MAX,
        binding: Binding | None = None,
    ) -> None:
        """An instance computes `places` requests at once. Binding is late by default."""
        self._binding = binding or LateBinding()
        self._sharing = _shares(self._binding)
        self._limits = RowLimits(self._binding, dispatched_ahead_max, live_ahead_max, places)
        self._places = places
        self.requests: dict[RequestId, RequestRecord] = {}
        #: per part, waiting requests
        self._waiting: dict[Part, ClientQueues[RequestRecord]] = {}
        #: prompt tokens in `_waiting`, per part
        self._waiting_tokens: dict[Part, int] = {}
        #: per worker that has any: requests that were dispatched to it
        self._outstanding: dict[WorkerRef, Outstanding] = {}
        #: per part, the clients that sent something lately
        self._recent: dict[Part, RecentClients] = {}
        #: per part, requests that no instance had room for when they were last dealt out
        self._left_over: dict[Part, int] = {}
        #: per part, requests that are not over
        self._unfinished: dict[Part, int] = {}
        #: parts whose requests changed since that was last looked at
        self.touched: dict[Part, None] = {}
        self._arrivals = 0
        #: requests that were given to workers, however often
        self._placed = 0

    # -- what happened ----------------------------------------------------------------------

    def arrive(
        self,
        request: RequestId,
        part: Part,
        prompt_tokens: int,
        *,
        now_ns: int = 0,
        client: ClientShare = _NOBODY,
        wait_ns: int | None = None,
    ) -> RequestRecord:
        """A new request waits behind those of its client. After `wait_ns` it is late (None:
        never)."""
        assert request not in self.requests, f"{request} arrived twice"
        self._arrivals += 1
        record = RequestRecord(
            id=request,
            part=part,
            entry=part,
            prompt_tokens=prompt_tokens,
            order=self._arrivals,
            client=client.name,
            weight=client.weight,
            late_ns=None if wait_ns is None else now_ns + wait_ns,
        )
        self.requests[request] = record
        self._unfinished[part] = self.unfinished(part) + 1
        self._recent.setdefault(part, RecentClients()).saw(client.name, now_ns)
        self._enqueue(record)
        return record

    def place(self, record: RequestRecord, worker: WorkerRef) -> None:
        """The attempt is under way on the worker: it uses up a turn of the client."""
        self._dequeue(record, is_served=True)
        self._hold(record, worker)

    def found(self, record: RequestRecord, worker: WorkerRef) -> None:
        """The request that arrived is under way on the worker since an earlier life. Nobody's turn
        is used up by that: while others waited here, its client may have had none."""
        self._dequeue(record)
        record.is_admitted = record.is_started = True
        self._hold(record, worker)

    def admit(self, request: RequestId, attempt: int) -> None:
        """The instance gave the request a place and KV."""
        record = self._under_way(request, attempt)
        if record is not None and not record.is_admitted:
            self._outstanding_of(record).admit(record)

    def start(self, request: RequestId, attempt: int) -> None:
        """The instance emitted the request's first token."""
        record = self._under_way(request, attempt)
        if record is not None and not record.is_started:
            self._outstanding_of(record).start(record)

    def progressed(self, worker: WorkerRef, report: InstanceReported) -> None:
        """The worker's instance reports its load; what it started was told before."""
        outstanding = self._outstanding.get(worker)
        if outstanding is not None:
            outstanding.reported(report)

    def move(self, record: RequestRecord, worker: WorkerRef, part: Part | None = None) -> None:
        """This worker has taken the current attempt over, wherever it was: it has a place there.
        The request is the work of `part` now (None: of the same as before)."""
        if record.worker is not None:
            self._unplace(record)
        record.is_admitted = True
        self.place(record, worker)
        if part is not None:
            self._change_part(record, part)

    def worker_serves(self, worker: WorkerRef, part: Part) -> None:
        """An instance has another role: what it has is the work of that part."""
        for record in self.on_worker(worker):
            self._change_part(record, part)

    def retry(self, record: RequestRecord) -> None:
        """The attempt under way is over: the request waits again, at its old place."""
        self._unplace(record)
        self._change_part(record, record.entry)
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

    def forget_part(self, part: Part) -> None:
        """The part's model leaves the pool: no request needs it."""
        assert not self.unfinished(part), f"{part} has requests"
        known: tuple[dict[Part, Any], ...] = (
            self._unfinished,
            self._waiting_tokens,
            self._left_over,
            self._recent,
        )
        for values in known:
            values.pop(part, None)

    # -- what to do -------------------------------------------------------------------------

    def assign(
        self, now_ns: int, part: Part, routes: Iterable[Route], waking: int = 0
    ) -> list[Assignment]:
        """Hand waiting requests to routes with room, least outstanding work first.

        A loading instance that is alone gets those that would wait longer for the others, full or
        not. `waking` instances more will serve in a moment: what is their part of the prompt tokens
        waits for them.
        """
        queue = self._waiting.get(part)
        if not queue:
            return []
        queue.now_ns = now_ns
        rows = [self._limits.row(route, self._outstanding) for route in routes]
        bound_rows(rows, self._waiting_tokens[part], waking)
        # Where prompts wait for others to be computed, no place is missing.
        is_short = isinstance(self._binding, EarlyBinding) or not any(r.room > 0 for r in rows)
        assignments = self._deal(now_ns, queue, rows)
        is_short = is_short or not any(row.room > 0 for row in rows)
        self._left_over[part] = self.waiting(part) if is_short else 0
        return assignments

    # -- what can be asked ------------------------------------------------------------------

    def waiting(self, part: Part) -> int:
        return len(self._waiting.get(part, ()))

    def waiting_of(self, part: Part) -> list[RequestRecord]:
        """The part's waiting requests, in order of arrival."""
        queue = self._waiting.get(part)
        records = () if queue is None else queue
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
        found = self._outstanding.get(worker)
        return 0 if found is None else found.tokens

    def on_worker(self, worker: WorkerRef) -> list[RequestRecord]:
        """Requests whose attempt is under way on the worker, in order of dispatch."""
        found = self._outstanding.get(worker)
        return [] if found is None else list(found.records.values())

    def validate(self) -> None:
        """Every request waits or is dispatched, and the counts agree. Raises AssertionError."""
        seen: dict[RequestId, str] = {}
        for part, queue in self._waiting.items():
            records = list(queue)
            assert sorted(r.id for r in queue.in_turn()) == sorted(r.id for r in records), part
            for client in dict.fromkeys(record.client for record in records):
                orders = [record.order for record in records if record.client == client]
                assert orders == sorted(orders), f"queue of {client} to {part} is out of order"
            assert len(records) == len(queue)
            assert self._waiting_tokens[part] == sum(r.prompt_tokens for r in records)
            seen.update(dict.fromkeys((record.id for record in records), "waiting"))
        for worker, outstanding in self._outstanding.items():
            outstanding.validate(worker)
            assert not seen.keys() & outstanding.records.keys(), worker
            seen.update(dict.fromkeys(outstanding.records, "dispatched"))
        assert sorted(seen) == sorted(self.requests)
        assert sum(self._unfinished.values()) == len(self.requests)

    # -- helpers ----------------------------------------------------------------------------

    def _deal(
        self, now_ns: int, queue: ClientQueues[RequestRecord], rows: list[RouteRow]
    ) -> list[Assignment]:
        assignments: list[Assignment] = []
        if not any(row.is_open for row in rows):
            return assignments
        recent = self._recent[next(iter(queue)).part]
        #: clients that hold as many places as they may, or whose first request must go first
        sated: dict[str, None] = {}
        for record in queue.in_turn(sated):
            shunned = record.avoided if now_ns < record.avoided_until_ns else ()
            is_bounded = recent.has_others(record.client, now_ns)
            fitting = [r for r in rows if self._may_hold(r, record.client)] if is_bounded else rows
            due = queue.due_before(record)
            if not fitting or (due is not None and now_ns >= due.avoided_until_ns):
                sated[record.client] = None
                continue
            fitting = empty_rows(fitting, shunned) if record.is_alone else fitting
            row = choose_row(fitting, record.prompt_tokens, shunned)
            if row is None:
                continue
            is_fitting = row.fits(record.prompt_tokens)
            row.add(record.prompt_tokens)
            if not is_fitting:
                # It waits for this one, and so do those behind it. Other clients do not fill up
                # meanwhile what it could go to next.
                for other in fitting if is_bounded and not shunned else ():
                    other.room = other.room if other.lag_tokens else 0
                if not any(row.is_open for row in rows):
                    break
                continue
            row.room = 0 if record.is_alone else row.room - 1
            record.attempt += 1
            record.moves = 0
            record.lost_taker = None
            record.is_admitted = record.is_started = False
            record.failure = ""
            self.place(record, row.worker)
            assignments.append(Assignment(record, row.instance, row.worker))
        return assignments

    def _may_hold(self, row: RouteRow, client: str) -> bool:
        """The client does not have all places yet that it may have beside other clients."""
        most = max(1, self._places - max(1, self._places // _SPARED_SHARE)) * len(row.workers)
        known = (self._outstanding.get(worker) for worker in row.workers)
        return sum(o.clients.get(client, 0) for o in known if o is not None) < most

    def _hold(self, record: RequestRecord, worker: WorkerRef) -> None:
        record.worker = worker
        outstanding = self._outstanding.setdefault(worker, Outstanding())
        outstanding.add(record)
        self._placed += 1
        outstanding.newest = self._placed

    def _enqueue(self, record: RequestRecord) -> None:
        self.touched[record.part] = None
        self._waiting.setdefault(record.part, ClientQueues(self._sharing)).add(record)
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

    def _change_part(self, record: RequestRecord, part: Part) -> None:
        if record.part == part:
            return
        assert record.worker is not None or record not in self._waiting.get(record.part, ()), record
        self._unfinished[record.part] -= 1
        self.touched[record.part] = None
        record.part = part
        self._unfinished[part] = self.unfinished(part) + 1
        self.touched[part] = None

    def _unplace(self, record: RequestRecord) -> None:
        worker, outstanding = record.worker, self._outstanding_of(record)
        assert worker is not None
        outstanding.remove(record)
        if not outstanding.records:
            del self._outstanding[worker]
        record.worker = None

    def _under_way(self, request: RequestId, attempt: int) -> RequestRecord | None:
        """The request, if this attempt is under way at it."""
        record = self.requests.get(request)
        if record is None or record.attempt != attempt or record.worker is None:
            return None
        return record

    def _outstanding_of(self, record: RequestRecord) -> Outstanding:
        assert record.worker is not None, record
        return self._outstanding[record.worker]


def _shares(binding: Binding) -> QueueShares:
    """Of one client's requests; early binding takes them in order of arrival."""
    if isinstance(binding, EarlyBinding):
        return QueueShares()
    return QueueShares(binding.oldest_prompt_percent, binding.passes_max, binding.run_tokens_max)
