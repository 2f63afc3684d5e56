"""The requests of a gateway that are not over: what is known of each, and how many wait and run.

No sockets and no decisions: `pool_backend.py` says what happens to them, also to those whose time
to wait is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from livescale.gateway.admission import WaitingLine
from livescale.gateway.backend import (
    GenerateRequest,
    GenerationFailed,
    ModelWithdrawn,
    Reading,
    TokenChunk,
)
from livescale.slo import RequestTiming, SloAbsolute
from livescale.telemetry.record import RequestLine
from livescale.types import Outcome, RequestId, WorkerRef


@dataclass(slots=True)
class Transcript:
    """One request until it is over. `worker` is moved by `Transcripts` only."""

    asked: GenerateRequest
    queued_ns: int
    #: what the client's handler reads; None ends the stream
    chunks: asyncio.Queue[TokenChunk | GenerationFailed | None] = field(
        default_factory=asyncio.Queue
    )
    generated: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    attempt: int = 0
    #: how often the current attempt was taken over
    moves: int = 0
    #: who runs the current attempt (None: it waits in the router)
    worker: WorkerRef | None = None
    last_worker: WorkerRef | None = None
    first_dispatched_ns: int | None = None
    dispatched_ns: int | None = None
    #: announced to a restarted controller, which may have missed the worker's RequestEnded
    is_announced_again: bool = False
    #: runs while it waits: what happens when that takes too long
    deadline: asyncio.TimerHandle | None = None

    def is_run_by(self, worker: WorkerRef, attempt: int) -> bool:
        """This is the current attempt, and that worker owns it."""
        return (worker, attempt) == (self.worker, self.attempt)

    def line(self, outcome: Outcome, error: str | None, slo: SloAbsolute | None) -> RequestLine:
        """Its line for the run record, now that it is over."""
        asked, finished_ns = self.asked, time.monotonic_ns()
        timing = RequestTiming(
            request=asked.request,
            scheduled_ns=self.queued_ns,
            sent_ns=self.queued_ns,
            token_ns=tuple(self.token_ns),
            finished_ns=finished_ns,
            ok=outcome is Outcome.FINISHED,
        )
        return RequestLine(
            request=asked.request,
            model=asked.model,
            prompt_tokens=len(asked.prompt_ids),
            output_tokens_max=asked.sampling.output_tokens_max,
            queued_ns=self.queued_ns,
            finished_ns=finished_ns,
            outcome=outcome,
            attempts=self.attempt,
            arrived_ns=asked.arrived_ns,
            first_dispatched_ns=self.first_dispatched_ns,
            dispatched_ns=self.dispatched_ns,
            token_ns=timing.token_ns,
            client_request=asked.client_request_id,
            worker=self.last_worker,
            slo_met=slo.is_met(timing) if slo is not None else None,
            error=error,
        )


class StopWords:
    """Who was told to stop which attempt: once is enough. The oldest are forgotten."""

    def __init__(self, remembered_max: int = 4096) -> None:
        self._remembered_max = remembered_max
        self._told: dict[tuple[WorkerRef, RequestId, int], None] = {}

    def is_new(self, worker: WorkerRef, request: RequestId, attempt: int) -> bool:
        """It was not told yet; from now on it was."""
        key = (worker, request, attempt)
        if key in self._told:
            return False
        if len(self._told) >= self._remembered_max:
            del self._told[next(iter(self._told))]
        self._told[key] = None
        return True

    def forget(self, worker: WorkerRef, request: RequestId, attempt: int) -> None:
        """What it does from now on is something else."""
        self._told.pop((worker, request, attempt), None)


class Transcripts:
    """All transcripts, and per model a bounded line of those that no worker runs.

    Iterate over them in the order in which they came.
    """

    def __init__(
        self,
        requests_max: int,
        prompt_tokens_max: int | None,
        wait_max_s: float | None,
        waited: Callable[[Transcript], None],
    ) -> None:
        """`waited` is called with a request that has waited for `wait_max_s` at a stretch."""
        self._requests_max = requests_max
        self._prompt_tokens_max = prompt_tokens_max
        self._wait_max_s = wait_max_s
        self._waited = waited
        self._open: dict[RequestId, Transcript] = {}
        self._offered: frozenset[str] = frozenset()
        #: of the models on offer, and of those that have requests yet
        self._lines: dict[str, WaitingLine] = {}
        self._running: dict[str, int] = {}

    def __iter__(self) -> Iterator[Transcript]:
        return iter(self._open.values())

    def offer(self, models: Iterable[str]) -> None:
        """From now on exactly these models take new requests."""
        self._offered = frozenset(models)
        for model in sorted(self._offered - self._lines.keys()):
            self._lines[model] = WaitingLine(self._requests_max, self._prompt_tokens_max)
            self._running[model] = 0
        for model in list(self._lines):
            self._forget_if_gone(model)

    def get(self, request: RequestId) -> Transcript | None:
        return self._open.get(request)

    def holding(
        self, model: str, requests: int, prompt_tokens: int, client: str
    ) -> AbstractContextManager[None]:
        """Places for requests that are not there yet. Raises ModelWithdrawn; entering QueueFull."""
        return self._line(model).holding(client, requests, prompt_tokens, time.monotonic())

    def open(self, requests: Sequence[GenerateRequest]) -> list[Transcript]:
        """Begin with requests of one client to one model; all of them wait.

        Raises QueueFull or ModelWithdrawn for all.
        """
        line, now_ns = self._line(requests[0].model), time.monotonic_ns()
        prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        client = requests[0].client.name
        line.check(client, len(requests), prompt_tokens, now_ns / 1e9)
        line.join(client, prompt_tokens, now_ns / 1e9, len(requests))
        opened = [Transcript(request, now_ns) for request in requests]
        self._open |= {transcript.asked.request: transcript for transcript in opened}
        for transcript in opened:
            self._start_deadline(transcript)
        return opened

    def place(
        self, transcript: Transcript, worker: WorkerRef, *, is_dispatched: bool = True
    ) -> None:
        """The worker runs the request; it waits no longer. Not `is_dispatched`: it took the
        attempt over from another one."""
        asked, now_ns = transcript.asked, time.monotonic_ns()
        self._stop_deadline(transcript)
        if transcript.worker is None:
            line = self._lines[asked.model]
            line.move_on(asked.client.name, len(asked.prompt_ids), now_ns / 1e9)
            self._running[asked.model] += 1
        transcript.worker = transcript.last_worker = worker
        if transcript.first_dispatched_ns is None:
            transcript.first_dispatched_ns = now_ns
        if is_dispatched:
            transcript.dispatched_ns = now_ns

    def wait_again(self, transcript: Transcript) -> None:
        """Nobody runs the request (any more)."""
        if transcript.worker is not None:
            transcript.worker = None
            asked = transcript.asked
            self._running[asked.model] -= 1
            line = self._lines[asked.model]
            line.join(asked.client.name, len(asked.prompt_ids), time.monotonic())
            self._start_deadline(transcript)

    def close(self, transcript: Transcript) -> None:
        """The request is over."""
        asked = transcript.asked
        self._stop_deadline(transcript)
        del self._open[asked.request]
        if transcript.worker is None:
            self._lines[asked.model].leave(asked.client.name, len(asked.prompt_ids))
        else:
            self._running[asked.model] -= 1
        self._forget_if_gone(asked.model)

    def wait_s(self, model: str, client: str) -> float:
        """How long the client's requests that wait for the model will take, by what was
        measured."""
        return self._lines[model].wait_s(client, time.monotonic())

    def readings(self) -> list[Reading]:
        """How many wait and run, by model."""
        readings = []
        for model, line in self._lines.items():
            label = (("model", model),)
            readings += [
                Reading("num_requests_waiting", line.requests, label),
                Reading("num_requests_running", self._running[model], label),
                Reading("waiting_prompt_tokens", line.prompt_tokens, label),
            ]
        return readings

    def __repr__(self) -> str:
        return f"<Transcripts {self._lines}, {self._running} run>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _forget_if_gone(self, model: str) -> None:
        """A model that is not on offer needs no line when nobody is in it."""
        has_requests = self._running[model] or self._lines[model].requests
        if model not in self._offered and not has_requests:
            del self._lines[model], self._running[model]

    def _line(self, model: str) -> WaitingLine:
        if model not in self._offered:
            raise ModelWithdrawn(model)
        return self._lines[model]

    def _start_deadline(self, transcript: Transcript) -> None:
        if self._wait_max_s is not None:
            loop = asyncio.get_running_loop()
            transcript.deadline = loop.call_later(self._wait_max_s, self._waited, transcript)

    def _stop_deadline(self, transcript: Transcript) -> None:
        if transcript.deadline is not None:
            transcript.deadline.cancel()
            transcript.deadline = None
