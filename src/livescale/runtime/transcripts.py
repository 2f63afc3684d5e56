"""The requests of a gateway that are not over: what is known of each, and how many wait and run.

No sockets and no decisions: `pool_backend.py` says what happens to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from livescale.gateway.admission import WaitingLine
from livescale.gateway.backend import GenerateRequest, GenerationFailed, Reading, TokenChunk
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
    #: who runs the current attempt (None: it waits in the router)
    worker: WorkerRef | None = None
    last_worker: WorkerRef | None = None
    first_dispatched_ns: int | None = None
    dispatched_ns: int | None = None
    #: announced to a restarted controller, which may have missed the worker's RequestEnded
    is_announced_again: bool = False

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
            dispatched_ns=self.dispatched_ns,
            token_ns=timing.token_ns,
            client_request=asked.client_request_id,
            worker=self.last_worker,
            slo_met=slo.is_met(timing) if slo is not None else None,
            error=error,
        )


class Transcripts:
    """All transcripts, and per model a bounded line of those that no worker runs.

    Iterate over them in the order in which they came.
    """

    def __init__(
        self, models: Iterable[str], requests_max: int, prompt_tokens_max: int | None
    ) -> None:
        self._open: dict[RequestId, Transcript] = {}
        self._lines = {model: WaitingLine(requests_max, prompt_tokens_max) for model in models}
        self._running = dict.fromkeys(self._lines, 0)

    def __iter__(self) -> Iterator[Transcript]:
        return iter(self._open.values())

    def get(self, request: RequestId) -> Transcript | None:
        return self._open.get(request)

    def holding(
        self, model: str, requests: int, prompt_tokens: int
    ) -> AbstractContextManager[None]:
        """Places for requests that are not there yet. Entering raises QueueFull."""
        return self._lines[model].holding(requests, prompt_tokens, time.monotonic())

    def open(self, requests: Sequence[GenerateRequest]) -> list[Transcript]:
        """Begin with requests of one model; all of them wait. Raises QueueFull for all."""
        line, now_ns = self._lines[requests[0].model], time.monotonic_ns()
        prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        line.check(len(requests), prompt_tokens, now_ns / 1e9)
        line.join(prompt_tokens, now_ns / 1e9, len(requests))
        opened = [Transcript(request, now_ns) for request in requests]
        self._open |= {transcript.asked.request: transcript for transcript in opened}
        return opened

    def place(self, transcript: Transcript, worker: WorkerRef) -> None:
        """The worker runs the request; it waits no longer."""
        asked, now_ns = transcript.asked, time.monotonic_ns()
        if transcript.worker is None:
            self._lines[asked.model].move_on(len(asked.prompt_ids), now_ns / 1e9)
            self._running[asked.model] += 1
        transcript.worker = transcript.last_worker = worker
        transcript.dispatched_ns = now_ns
        if transcript.first_dispatched_ns is None:
            transcript.first_dispatched_ns = now_ns

    def wait_again(self, transcript: Transcript) -> None:
        """Nobody runs the request (any more)."""
        if transcript.worker is not None:
            transcript.worker = None
            asked = transcript.asked
            self._running[asked.model] -= 1
            self._lines[asked.model].join(len(asked.prompt_ids), time.monotonic())

    def close(self, transcript: Transcript) -> None:
        """The request is over."""
        asked = transcript.asked
        del self._open[asked.request]
        if transcript.worker is None:
            self._lines[asked.model].leave(len(asked.prompt_ids))
        else:
            self._running[asked.model] -= 1

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
