"""The requests of a gateway that are not over: their tokens and times, and how many wait and run.

No sockets and no decisions: `pool_backend.py` says what happens to them, also to those whose time
to wait is over. Which worker owns which attempt: see `member/ledger.py`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from livescale.config.slo import RequestTiming, SloAbsolute
from livescale.gateway.contract import backend
from livescale.gateway.contract.admission import WaitingLine
from livescale.member.ledger import Announce, Finish
from livescale.member.waits import Waits
from livescale.messages.commands import Dispatch
from livescale.messages.events import RequestArrived
from livescale.runtime.wire import protocol
from livescale.telemetry.record.record import RequestLine
from livescale.values.types import Outcome, RequestId, WorkerRef
from livescale.values.units import NS_PER_S


@dataclass(slots=True)
class Transcript:
    """One request until it is over."""

    asked: backend.GenerateRequest
    queued_ns: int
    #: known in the turn of the event loop that opens the request
    sink: backend.TokenSink = field(init=False)
    #: of each token, its id and when it came (ns), in turns
    tokens: array[int] = field(default_factory=partial(array, "q"))
    last_worker: WorkerRef | None = None
    first_dispatched_ns: int | None = None
    dispatched_ns: int | None = None

    def arrival(self, announced: Announce) -> RequestArrived:
        """What the controller is told of it."""
        asked = self.asked
        return RequestArrived(
            request=asked.request,
            model=asked.model,
            prompt_tokens=len(asked.prompt_ids),
            output_tokens_max=asked.sampling.output_tokens_max,
            attempt=announced.attempt,
            worker=announced.owner,
            client=asked.client.name,
            weight=asked.client.weight,
            moves=announced.moves,
        )

    def submission(self, order: Dispatch) -> protocol.Submit:
        """What the worker of this dispatch is sent, now."""
        self.dispatched_ns = time.monotonic_ns()
        return protocol.Submit(
            request=order.request,
            attempt=order.attempt,
            instance=order.instance,
            prompt_ids=self.asked.prompt_ids,
            generated_ids=tuple(self.tokens[::2]),
            sampling=self.asked.sampling,
        )

    def line(self, end: Finish, slo: SloAbsolute | None) -> RequestLine:
        """Its line for the run record, now that it is over."""
        asked, finished_ns = self.asked, time.monotonic_ns()
        timing = RequestTiming(
            request=asked.request,
            scheduled_ns=self.queued_ns,
            sent_ns=self.queued_ns,
            token_ns=tuple(self.tokens[1::2]),
            finished_ns=finished_ns,
            ok=end.outcome is Outcome.FINISHED,
        )
        return RequestLine(
            request=asked.request,
            model=asked.model,
            prompt_tokens=len(asked.prompt_ids),
            output_tokens_max=asked.sampling.output_tokens_max,
            queued_ns=self.queued_ns,
            finished_ns=finished_ns,
            outcome=end.outcome,
            attempts=end.attempts,
            arrived_ns=asked.arrived_ns,
            first_dispatched_ns=self.first_dispatched_ns,
            dispatched_ns=self.dispatched_ns,
            token_ns=timing.token_ns,
            client_request=asked.client_request_id,
            worker=self.last_worker,
            slo_met=slo.is_met(timing) if slo is not None else None,
            error=end.reason or None,
        )


class Transcripts:
    """All transcripts, and per model a bounded line of those that no worker runs."""

    def __init__(
        self,
        requests_max: int,
        prompt_tokens_max: int | None,
        wait_max_s: float | None,
        waited: Callable[[Transcript], None],
    ) -> None:
        """`waited` is called with a request that has waited for `wait_max_s` at a stretch, and
        ends it."""
        self._requests_max = requests_max
        self._prompt_tokens_max = prompt_tokens_max
        self._waits = Waits(None if wait_max_s is None else round(wait_max_s * NS_PER_S))
        self._waited = waited
        #: at the latest when the next wait ends (None: no request waits)
        self._alarm: asyncio.TimerHandle | None = None
        self._open: dict[RequestId, Transcript] = {}
        self._offered: frozenset[str] = frozenset()
        #: of the models on offer, and of those that have requests yet
        self._lines: dict[str, WaitingLine] = {}
        self._running: dict[str, int] = {}

    def __getitem__(self, request: RequestId) -> Transcript:
        return self._open[request]

    def offer(self, models: Iterable[str]) -> None:
        """From now on exactly these models take new requests."""
        self._offered = frozenset(models)
        for model in sorted(self._offered - self._lines.keys()):
            self._lines[model] = WaitingLine(self._requests_max, self._prompt_tokens_max)
            self._running[model] = 0
        for model in list(self._lines):
            self._forget_if_gone(model)

    def holding(
        self, model: str, requests: int, prompt_tokens: int, client: str
    ) -> AbstractContextManager[None]:
        """Places for requests that are not there yet. Raises ModelWithdrawn; entering QueueFull."""
        return self._line(model).holding(client, requests, prompt_tokens, time.monotonic())

    def open(self, requests: Sequence[backend.GenerateRequest]) -> list[Transcript]:
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
            self._begin_wait(transcript, now_ns)
        return opened

    def move(self, request: RequestId, before: WorkerRef | None, after: WorkerRef | None) -> None:
        """Another worker runs the request (None: the request waits)."""
        transcript, now_ns = self._open[request], time.monotonic_ns()
        asked = transcript.asked
        line = self._lines[asked.model]
        if before is None:
            self._waits.end(request)
            line.move_on(asked.client.name, len(asked.prompt_ids), now_ns / 1e9)
            self._running[asked.model] += 1
        if after is None:
            self._running[asked.model] -= 1
            line.join(asked.client.name, len(asked.prompt_ids), now_ns / 1e9)
            self._begin_wait(transcript, now_ns)
            return
        transcript.last_worker = after
        if transcript.first_dispatched_ns is None:
            transcript.first_dispatched_ns = now_ns

    def close(self, request: RequestId, *, is_running: bool) -> Transcript:
        """The request is over."""
        transcript = self._open.pop(request)
        asked = transcript.asked
        self._waits.end(request)
        if is_running:
            self._running[asked.model] -= 1
        else:
            self._lines[asked.model].leave(asked.client.name, len(asked.prompt_ids))
        self._forget_if_gone(asked.model)
        return transcript

    def take(self, token: protocol.Token, now_ns: int) -> None:
        """The next one of its request has come, and is on its way to the client."""
        transcript = self._open[token.request]
        transcript.tokens.append(token.token_id)
        transcript.tokens.append(now_ns)
        transcript.sink.take(token)

    def wait_s(self, model: str, client: str) -> float:
        """How long the client's requests that wait for the model will take, by what was
        measured."""
        return self._lines[model].wait_s(client, time.monotonic())

    def readings(self) -> list[backend.Reading]:
        """How many wait and run, by model."""
        readings = []
        for model, line in self._lines.items():
            label = (("model", model),)
            readings += [
                backend.Reading("num_requests_waiting", line.requests, label, is_own=True),
                backend.Reading("num_requests_running", self._running[model], label, is_own=True),
                backend.Reading("waiting_prompt_tokens", line.prompt_tokens, label, is_own=True),
            ]
        return readings

    def __repr__(self) -> str:
        return f"<Transcripts {self._lines}, {self._running} run>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _forget_if_gone(self, model: str) -> None:
        """A model that is not on offer needs no line when no request is in it."""
        has_requests = self._running[model] or self._lines[model].requests
        if model not in self._offered and not has_requests:
            del self._lines[model], self._running[model]

    def _line(self, model: str) -> WaitingLine:
        if model not in self._offered:
            raise backend.ModelWithdrawn(model)
        return self._lines[model]

    def _begin_wait(self, transcript: Transcript, now_ns: int) -> None:
        self._waits.begin(transcript.asked.request, now_ns)
        self._look_ahead()

    def _look_ahead(self) -> None:
        next_ns = self._waits.next_ns
        if self._alarm is None and next_ns is not None:
            left_s = (next_ns - time.monotonic_ns()) / NS_PER_S
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._end_waits)

    def _end_waits(self) -> None:
        self._alarm = None
        while (request := self._waits.take_over(time.monotonic_ns())) is not None:
            self._waited(self._open[request])
        self._look_ahead()
