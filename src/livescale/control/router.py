"""The router: holds the queue of every model and hands requests to instances.

Requests wait here (ids and sizes only), first come, first served. An instance holds at most
`dispatched_ahead_max` requests that it has not started, so that what waits can still go elsewhere.
`assign` is synchronous, has no side effects outside, and may be called again after any change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from livescale.types import InstanceId, RequestId, WorkerRef


@dataclass(slots=True)
class RequestRecord:
    """A request that has not ended. `worker` is set while an attempt is under way."""

    id: RequestId
    model: str
    prompt_tokens: int
    output_tokens_max: int
    #: order of arrival: a retried request goes back to its place
    order: int
    attempt: int = 0
    worker: WorkerRef | None = None
    is_started: bool = False
    is_cancelled: bool = False
    #: a worker that the gateway could not reach, and until when it is left alone
    avoided: WorkerRef | None = None
    avoided_until_ns: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """The router's choice: this request's next attempt runs on that instance."""

    request: RequestRecord
    instance: InstanceId
    worker: WorkerRef


class Router:
    """Queue and whereabouts of all unfinished requests."""

    def __init__(self, dispatched_ahead_max: int) -> None:
        self._ahead_max = dispatched_ahead_max
        self.requests: dict[RequestId, RequestRecord] = {}
        #: per model, waiting requests in order of arrival
        self._waiting: dict[str, dict[RequestId, RequestRecord]] = {}
        #: prompt tokens in `_waiting`, per model
        self._waiting_tokens: dict[str, int] = {}
        #: per worker: dispatched and not ended
        self._dispatched: dict[WorkerRef, dict[RequestId, RequestRecord]] = {}
        #: per worker: of these, requests that it has not started, and the prompt tokens of all
        self._outstanding: dict[WorkerRef, list[int]] = {}
        #: per model, requests that are not over
        self._unfinished: dict[str, int] = {}
        #: models whose requests changed since somebody took note
        self.touched: dict[str, None] = {}
        self._arrivals = 0

    # -- what happened ----------------------------------------------------------------------

    def arrive(
        self, request: RequestId, model: str, prompt_tokens: int, output_tokens_max: int
    ) -> RequestRecord:
        """A new request waits at the end of its model's queue."""
        assert request not in self.requests, f"{request} arrived twice"
        self._arrivals += 1
        record = RequestRecord(request, model, prompt_tokens, output_tokens_max, self._arrivals)
        self.requests[request] = record
        self._unfinished[model] = self.unfinished(model) + 1
        self._enqueue(record)
        return record

    def place(self, record: RequestRecord, worker: WorkerRef) -> None:
        """The request's attempt is under way on the worker."""
        self._dequeue(record)
        record.worker = worker
        self._dispatched.setdefault(worker, {})[record.id] = record
        outstanding = self._outstanding.setdefault(worker, [0, 0])
        outstanding[0] += not record.is_started
        outstanding[1] += record.prompt_tokens

    def start(self, request: RequestId, attempt: int) -> None:
        """The instance admitted the request to its running batch."""
        record = self.requests.get(request)
        if record is not None and record.attempt == attempt and not record.is_started:
            record.is_started = True
            if record.worker is not None:
                self._outstanding[record.worker][0] -= 1

    def retry(self, record: RequestRecord) -> None:
        """The attempt under way failed: the request waits again, at its old place."""
        self._unplace(record)
        self._enqueue(record)
        queue = self._waiting[record.model]
        self._waiting[record.model] = dict(sorted(queue.items(), key=lambda item: item[1].order))

    def end(self, record: RequestRecord) -> None:
        """The request is over, wherever it was."""
        if record.worker is None:
            self._dequeue(record)
        else:
            self._unplace(record)
        del self.requests[record.id]
        self._unfinished[record.model] -= 1
        self.touched[record.model] = None

    # -- what to do -------------------------------------------------------------------------

    def assign(
        self, now_ns: int, model: str, instances: Iterable[tuple[InstanceId, WorkerRef]]
    ) -> list[Assignment]:
        """Hand waiting requests to instances with room, least outstanding work first."""
        queue = self._waiting.get(model)
        if not queue:
            return []
        #: [outstanding prompt tokens, instance, requests it can still take]
        room: list[list[int]] = []
        workers: dict[int, WorkerRef] = {}
        for instance, worker in instances:
            ahead, tokens = self._outstanding.get(worker, (0, 0))
            room.append([tokens, instance, self._ahead_max - ahead])
            workers[instance] = worker
        assignments: list[Assignment] = []
        if not any(row[2] > 0 for row in room):
            return assignments
        for record in list(queue.values()):
            shunned = record.avoided if now_ns < record.avoided_until_ns else None
            rows = [row for row in room if row[2] > 0 and workers[row[1]] != shunned]
            if not rows:
                if shunned is None:
                    break
                continue
            row = min(rows)
            row[0] += record.prompt_tokens
            row[2] -= 1
            record.attempt += 1
            record.is_started = False
            worker = workers[row[1]]
            self.place(record, worker)
            assignments.append(Assignment(record, row[1], worker))
        return assignments

    # -- what can be asked ------------------------------------------------------------------

    def waiting(self, model: str) -> int:
        return len(self._waiting.get(model, {}))

    def models_waiting(self) -> list[str]:
        """Models that have requests waiting, in no order that means anything."""
        return list(self._waiting)

    def unfinished(self, model: str) -> int:
        """Requests that wait or are dispatched."""
        return self._unfinished.get(model, 0)

    def waiting_tokens(self, model: str) -> int:
        """Prompt tokens of the requests that wait for an instance."""
        return self._waiting_tokens.get(model, 0)

    def on_worker(self, worker: WorkerRef) -> list[RequestRecord]:
        """Requests whose attempt is under way on the worker, in order of dispatch."""
        return list(self._dispatched.get(worker, {}).values())

    def validate(self) -> None:
        """Every request waits or is dispatched, and the counts agree. Raises AssertionError."""
        seen: dict[RequestId, str] = {}
        for model, queue in self._waiting.items():
            orders = [record.order for record in queue.values()]
            assert orders == sorted(orders), f"queue of {model} is out of order"
            assert self._waiting_tokens[model] == sum(r.prompt_tokens for r in queue.values())
            seen.update(dict.fromkeys(queue, "waiting"))
        for worker, records in self._dispatched.items():
            for request, record in records.items():
                assert record.worker == worker, request
                assert request not in seen, request
                seen[request] = "dispatched"
            ahead = sum(1 for record in records.values() if not record.is_started)
            tokens = sum(record.prompt_tokens for record in records.values())
            assert self._outstanding[worker] == [ahead, tokens], worker
        assert sorted(seen) == sorted(self.requests)
        assert sum(self._unfinished.values()) == len(self.requests)

    # -- helpers ----------------------------------------------------------------------------

    def _enqueue(self, record: RequestRecord) -> None:
        self.touched[record.model] = None
        self._waiting.setdefault(record.model, {})[record.id] = record
        tokens = self._waiting_tokens.get(record.model, 0)
        self._waiting_tokens[record.model] = tokens + record.prompt_tokens

    def _dequeue(self, record: RequestRecord) -> None:
        queue = self._waiting.get(record.model, {})
        if queue.pop(record.id, None) is not None:
            self.touched[record.model] = None
            self._waiting_tokens[record.model] -= record.prompt_tokens
            if not queue:
                del self._waiting[record.model]

    def _unplace(self, record: RequestRecord) -> None:
        assert record.worker is not None
        del self._dispatched[record.worker][record.id]
        outstanding = self._outstanding[record.worker]
        outstanding[0] -= not record.is_started
        outstanding[1] -= record.prompt_tokens
        if not self._dispatched[record.worker]:
            del self._dispatched[record.worker], self._outstanding[record.worker]
        record.worker = None
