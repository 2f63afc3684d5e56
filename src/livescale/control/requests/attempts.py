"""What happens to requests and their attempts: arrivals, ends, workers that are lost.

Only records; the router's queue is dealt out in the controller's decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from livescale.control.requests.router import ClientShare, Router
from livescale.control.requests.router_rows import RequestRecord
from livescale.control.state.config import ControllerConfig
from livescale.control.state.fleet import Fleet
from livescale.control.state.model_state import ModelState
from livescale.messages.commands import FailRequest
from livescale.messages.events import (
    BatchTaken,
    GatewayLost,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
)
from livescale.values.stages import stage_name
from livescale.values.types import Outcome, Part, WorkerRef, gateway_of


@dataclass(frozen=True, slots=True)
class _PartnerLost:
    """A worker ended that was in a team or a pipeline with a leader."""

    at_ns: int
    reason: str
    #: one of the requests that the leader had, or had given back, had lost a worker before
    had_suspect: bool


class Attempts:
    """Keeps the router true. Methods that take news return False when it is late."""

    def __init__(
        self,
        config: ControllerConfig,
        router: Router,
        states: Mapping[str, ModelState],
        fleet: Fleet,
    ) -> None:
        self._config = config
        self._router = router
        self._fleet = fleet
        self._states = states
        self._failed: list[FailRequest] = []
        #: requests whose attempts have failed too often, unless one is under way after all
        self._given_up: list[RequestRecord] = []
        #: workers that gateways have lost: when the first of them said so, and whether one of the
        #: requests there had lost another worker before
        self._suspected: dict[WorkerRef, tuple[int, bool]] = {}
        #: by leader, the last worker that its requests may have ended
        self._partners_lost: dict[WorkerRef, _PartnerLost] = {}
        #: ends of requests' avoidance of workers, in order
        self._avoid_ends_ns: deque[int] = deque()

    def arrived(self, event: RequestArrived, now_ns: int) -> bool:
        # Requests are for models; those of a model with stages come to the first one.
        state = self._states.get(event.model) or self._states.get(stage_name(event.model, 0))
        if state is None and event.worker is None:
            self._failed.append(FailRequest(event.request, f"{event.model} is not served"))
            return True
        if event.request in self._router.requests:
            return self._announced(self._router.requests[event.request], event, now_ns)
        if state is None:
            return False
        record = self._router.arrive(
            request=event.request,
            part=state.entry.part,
            prompt_tokens=event.prompt_tokens,
            now_ns=now_ns,
            client=ClientShare(event.client, event.weight),
            wait_ns=state.wait_ns,
        )
        record.attempt, record.moves = event.attempt, event.moves
        # Which earlier attempts were lost and which were given back is not known: none counts.
        if event.worker is None:
            state.entry.window.add(now_ns, event.prompt_tokens)
        else:
            # What the instance reports of its work is more exact than a guess which ones wait.
            self._router.found(record, event.worker)
        return True

    def _announced(self, record: RequestRecord, event: RequestArrived, now_ns: int) -> bool:
        """The gateway names a request that is known. News is that its attempt is over: it was given
        back, and what the worker sent of that was lost. Or that it had a later attempt: a request
        that failed here was announced once more, for its last attempt but one, before the gateway
        had received that. No attempt is given twice."""
        if event.worker is not None or event.attempt < record.attempt:
            return False
        is_later = event.attempt > record.attempt
        if is_later == (record.worker is not None):
            return False
        if is_later:
            record.attempt, record.moves = event.attempt, event.moves
        else:
            self._returned(record, now_ns)
        return True

    def taken(self, event: BatchTaken, part: Part | None) -> bool:
        """A worker has taken attempts over: those that are current are its own now, unless another
        one has taken them over since, whose word came first. They are the work of its instance's
        part (None: the instance is gone)."""
        current = self._current(event)
        for record, moves in current:
            record.moves = moves
            if record.failure:
                # Whom it was taken from is gone, but it is not.
                record.failures -= 1
                record.failure = ""
                record.is_alone = self._has_one_left(record)
            self._router.move(record, event.worker, part)
        return bool(current)

    def taken_by_lost(self, event: BatchTaken) -> bool:
        """The report of a worker that is gone. Where the attempts go on its gateway says; only if
        they have ended there, no word but the worker's own tells so."""
        for record, _ in self._current(event):
            record.lost_taker = event.worker
        return False

    def _current(self, event: BatchTaken) -> list[tuple[RequestRecord, int]]:
        """Of what was taken over the attempts that are current, and how often each was taken."""
        known = [(self._router.requests.get(r), a, moves) for r, a, moves in event.requests]
        return [(r, m) for r, a, m in known if r is not None and r.attempt == a and r.moves <= m]

    def cancelled(self, event: RequestCancelled, _now_ns: int) -> bool:
        record = self._router.requests.get(event.request)
        if record is None:
            return False
        if record.worker is None:
            self._router.end(record)
        else:
            record.is_cancelled = True
        return True

    def gateway_lost(self, event: GatewayLost, _now_ns: int) -> bool:
        """Its requests are forgotten at once. Whether it had sent a worker the last attempt nobody
        can say: a worker that has it gives it up, and what that reports is late."""
        requests = self._router.requests.values()
        lost = [record for record in requests if gateway_of(record.id) == event.gateway]
        for record in lost:
            self._router.end(record)
        return bool(lost)

    def ended(self, event: RequestEnded, now_ns: int) -> bool:
        record = self._router.requests.get(event.request)
        if record is None or record.attempt != event.attempt or record.worker is None:
            return False
        if event.outcome is Outcome.WORKER_LOST:
            # The gateway often sees it first: until WorkerLost is here the worker still looks
            # alive, and the request must not be sent to it again.
            worker = record.worker
            self._avoid_worker(record, now_ns)
            is_spared = self._had_suspect(worker, now_ns) and not record.failures
            is_spared = is_spared or self._fleet.is_leaving((worker,))
            self._attempt_failed(record, f"worker {worker} was lost", is_spared=is_spared)
        elif event.worker not in (None, record.worker):
            # Another worker has taken the attempt over, or that one had, and has ended it.
            if event.outcome is Outcome.RETURNED and event.moves > record.moves:
                # Its gateway does not know that, and what it sent of the taking was lost.
                self._returned(record, now_ns)
                return True
            has_ended = event.worker == record.lost_taker
            has_ended = has_ended and event.outcome is not Outcome.RETURNED
            if has_ended:
                self._router.end(record)
            return has_ended
        elif event.outcome is Outcome.RETURNED:
            if event.worker is None:
                # What the worker sent of that, and of the instance that it may have lost, is late.
                self._avoid_worker(record, now_ns)
            self._returned(record, now_ns)
        else:
            self._router.end(record)
        return True

    def worker_lost(
        self, worker: WorkerRef, now_ns: int, reason: str, *, is_spared: bool = False
    ) -> bool:
        """The attempts under way there have failed, and all of them are spared if that was no
        request's fault. False if there were none."""
        records = self._router.on_worker(worker)
        had_suspect = self._had_suspect(worker, now_ns)
        for record in records:
            is_innocent = is_spared or (had_suspect and not record.failures)
            self._attempt_failed(record, reason, is_spared=is_innocent)
        self._suspected.pop(worker, None)
        self._partners_lost.pop(worker, None)
        return bool(records)

    def partner_lost(self, leader: WorkerRef, now_ns: int, reason: str) -> None:
        """A worker ended through which requests of the `leader` may have gone. What that gives back
        about now, before this news or after it, was lost with the worker."""
        requests = self._router.requests.values()
        returned = [
            record
            for record in requests
            if record.returned_by == leader and self._is_about(record.returned_ns, now_ns)
        ]
        had_suspect = any(r.failures for r in (*returned, *self._router.on_worker(leader)))
        lost = _PartnerLost(now_ns, reason, had_suspect)
        self._partners_lost[leader] = lost
        for record in returned:
            self._lost_with_partner(record, lost)

    def fail_waiting(self, part: Part, reason: str, retry_after_ns: int) -> list[FailRequest]:
        """No request of the part waits any longer. It is tried again after that time."""
        records = self._router.waiting_of(part)
        for record in records:
            self._router.end(record)
        return [FailRequest(record.id, reason, retry_after_ns) for record in records]

    def take_failed(self) -> list[FailRequest]:
        """Requests that came to an end without a result since the last call. To be called when all
        news is in: an attempt may go on with who took it over."""
        for record in self._given_up:
            if record.failure and self._router.requests.get(record.id) is record:
                self._router.end(record)
                self._failed.append(FailRequest(record.id, record.failure))
        self._given_up = []
        failed, self._failed = self._failed, []
        return failed

    def _avoid_worker(self, record: RequestRecord, now_ns: int) -> None:
        """The request is not sent to the worker that has it now for a while, nor to those that it
        avoids already: it would come back from them in turn."""
        assert record.worker is not None, f"{record} is nowhere"
        before = record.avoided if now_ns < record.avoided_until_ns else ()
        record.avoided = tuple(dict.fromkeys((*before, record.worker)))
        record.avoided_until_ns = now_ns + self._config.avoid_ns
        if not self._avoid_ends_ns or self._avoid_ends_ns[-1] < record.avoided_until_ns:
            self._avoid_ends_ns.append(record.avoided_until_ns)

    def deadline_ns(self, now_ns: int) -> int | None:
        """When the next request avoids its workers no longer."""
        while self._avoid_ends_ns and self._avoid_ends_ns[0] <= now_ns:
            self._avoid_ends_ns.popleft()
        return self._avoid_ends_ns[0] if self._avoid_ends_ns else None

    def _returned(self, record: RequestRecord, now_ns: int) -> None:
        """The instance had to give the attempt up; that is not the request's fault, unless a worker
        ended with it that it went through."""
        if record.is_cancelled:
            self._router.end(record)
            return
        assert record.worker is not None, f"{record} is nowhere"
        record.returned_by, record.returned_ns = record.worker, now_ns
        lost = self._partners_lost.get(record.worker)
        self._router.retry(record)
        if lost is not None and self._is_about(lost.at_ns, now_ns):
            self._lost_with_partner(record, lost)

    def _is_about(self, then_ns: int, now_ns: int) -> bool:
        """What others and the controller see of a worker's end may be so far apart."""
        return now_ns - then_ns <= self._config.avoid_ns

    def _lost_with_partner(self, record: RequestRecord, lost: _PartnerLost) -> None:
        """An attempt that was given back ended with a worker; the next one may be under way, and
        come back, too, before all is told."""
        is_told = record.partner_lost_ns == lost.at_ns
        record.returned_by, record.partner_lost_ns = None, lost.at_ns
        if is_told or (lost.had_suspect and not record.failures):
            return
        record.failures += 1
        if record.worker is None:
            record.failure = lost.reason
            record.is_alone = self._has_one_left(record)
            self._give_up_late(record)

    def _had_suspect(self, worker: WorkerRef, now_ns: int) -> bool:
        """One of the requests that the worker had when it ended had lost another worker before. It
        may live on, and be lost to gateways alone: a later loss is another one."""
        had_one = any(record.failures for record in self._router.on_worker(worker))
        first_ns, had_one_then = self._suspected.get(worker, (now_ns, False))
        if self._is_about(first_ns, now_ns):
            self._suspected[worker] = first_ns, had_one_then or had_one
        else:
            self._suspected[worker] = now_ns, had_one
        return self._suspected[worker][1]

    def _attempt_failed(self, record: RequestRecord, reason: str, *, is_spared: bool) -> None:
        """The attempt ended with its worker, by which the request loses one unless it `is_spared`:
        that was another request's fault, or no request's. The last attempt of one that lost others
        is without company."""
        if record.is_cancelled:
            self._router.end(record)
            return
        if not is_spared:
            record.failures += 1
            record.failure = reason
        self._router.retry(record)
        record.is_alone = self._has_one_left(record)
        self._give_up_late(record)

    def _give_up_late(self, record: RequestRecord) -> None:
        """When all news is in, if no attempt of the request was left."""
        if record.failures >= self._config.request_attempts_max:
            self._given_up.append(record)

    def _has_one_left(self, record: RequestRecord) -> bool:
        """The request has lost workers, and one more would be the last."""
        return 0 < record.failures == self._config.request_attempts_max - 1
