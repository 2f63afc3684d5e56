"""What happens to requests and their attempts: arrivals, ends, workers that are lost.

Only records; the router's queue is dealt out in the controller's decision.
"""

from __future__ import annotations

from collections.abc import Mapping

from livescale.control.config import ControllerConfig
from livescale.control.model_state import ModelState
from livescale.control.router import RequestRecord, Router
from livescale.messages.commands import FailRequest
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.types import Outcome, WorkerRef


class Attempts:
    """Keeps the router true. Methods that take news return False when it is late."""

    def __init__(
        self, config: ControllerConfig, router: Router, states: Mapping[str, ModelState]
    ) -> None:
        self._config = config
        self._router = router
        self._states = states
        self._failed: list[FailRequest] = []
        #: the latest end of any request's avoidance of a worker
        self.avoid_until_ns = 0

    def arrived(self, event: RequestArrived, now_ns: int) -> bool:
        state = self._states.get(event.model)
        if state is None and event.worker is None:
            self._failed.append(FailRequest(event.request, f"{event.model} is not served"))
            return True
        if state is None or event.request in self._router.requests:
            return False
        record = self._router.arrive(
            event.request, event.model, event.prompt_tokens, event.output_tokens_max
        )
        record.attempt = event.attempt
        if event.worker is None:
            state.window.add(now_ns, event.prompt_tokens)
        else:
            record.is_started = True
            self._router.place(record, event.worker)
        return True

    def cancelled(self, event: RequestCancelled) -> bool:
        record = self._router.requests.get(event.request)
        if record is None:
            return False
        if record.worker is None:
            self._router.end(record)
        else:
            record.is_cancelled = True
        return True

    def ended(self, event: RequestEnded, now_ns: int) -> bool:
        record = self._router.requests.get(event.request)
        if record is None or record.attempt != event.attempt or record.worker is None:
            return False
        if event.outcome is Outcome.WORKER_LOST:
            # The gateway often sees it first: until WorkerLost is here the worker still looks
            # alive, and the request must not be sent to it again.
            record.avoided = record.worker
            record.avoided_until_ns = now_ns + self._config.avoid_ns
            self.avoid_until_ns = max(self.avoid_until_ns, record.avoided_until_ns)
            self._attempt_failed(record, f"worker {record.worker} was lost")
        else:
            self._router.end(record)
        return True

    def worker_lost(self, worker: WorkerRef, reason: str) -> None:
        """The attempts under way there have failed."""
        for record in self._router.on_worker(worker):
            self._attempt_failed(record, reason)

    def take_failed(self) -> list[FailRequest]:
        """Requests that came to an end without a result since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _attempt_failed(self, record: RequestRecord, reason: str) -> None:
        if record.is_cancelled:
            self._router.end(record)
        elif record.attempt >= self._config.request_attempts_max:
            self._router.end(record)
            self._failed.append(FailRequest(record.id, reason))
        else:
            self._router.retry(record)
