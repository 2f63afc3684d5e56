"""The load of a soak: streamed completions at bursty times, each followed to its end.

A request ends in one of the words of `SoakEnd`. What the pool is to blame for is lost or hung;
nothing is excused but a connection that was broken by a fault of the gateway itself: no pool can
keep a connection whose process dies, and such a request is sent once more.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from dataclasses import dataclass, field

import httpx

from livescale.lab.client.completion import (
    CompletionStream,
    StreamError,
    completion_body,
    error_message,
)
from livescale.values.types import Value

#: a stream that sends nothing for so long hangs
_SILENCE_S = 60.0
_PROBE_TOKENS = 2
_TRIES_MAX = 5
# The first half of so many requests comes slowly, the second half in a burst.
_CYCLE_REQUESTS = 80
_BURST_FACTOR = 4.0
# Of the requests; the others go to the pool's first model.
_QUIET_SHARE = 0.05
_LEAVING_SHARE = 0.05


class SoakEnd(enum.StrEnum):
    """How a request ended."""

    DONE = "done"
    LEFT = "left"  # the client went away, as planned
    LOST = "lost"
    HUNG = "hung"


class LoadShape(Value, frozen=True):
    """What is sent. `rate` is the mean of arrivals, in requests per second."""

    requests: int
    seed: int
    rate: float
    models: tuple[str, ...]
    vocabulary: int
    prompts: int = 64
    prompt_tokens: int = 120
    output_tokens: int = 48


@dataclass(slots=True)
class SoakRequest:
    """One request. Times are CLOCK_MONOTONIC; `moved_ns` is when something came last."""

    number: int
    model: str
    prompt: int
    output_tokens: int
    #: tokens after which the client goes away (None: it stays)
    leaves_after: int | None = None
    sent_ns: int = 0
    moved_ns: int = 0
    tries: int = 0
    token_ids: list[int] = field(default_factory=list)
    end: SoakEnd | None = None
    reason: str = ""


class SoakLoad:
    """Sends the requests of a shape. `outputs` counts what came, by prompt and tokens."""

    def __init__(self, base_url: str, shape: LoadShape) -> None:
        self.shape = shape
        self.requests: list[SoakRequest] = []
        self.outputs: dict[tuple[int, tuple[int, ...]], int] = {}
        #: when faults of the gateway were struck
        self.gateway_faults_ns: list[int] = []
        #: connections that such a fault broke
        self.broken = 0
        self._rng = random.Random(shape.seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(_SILENCE_S, connect=_SILENCE_S)
        self._client = httpx.AsyncClient(
            base_url=base_url, limits=limits, timeout=timeout, trust_env=False
        )

    async def close(self) -> None:
        await self._client.aclose()

    # -- the load -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send all requests and return when each has ended."""
        tasks = []
        due_s = time.monotonic()
        for number in range(self.shape.requests):
            request = self._new_request(number)
            self.requests.append(request)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._follow(request)))
            due_s += self._gap_s(number)
        await asyncio.gather(*tasks)

    def prompt_ids(self, prompt: int) -> list[int]:
        """The ids of a prompt; they depend on its number and the seed alone."""
        rng = random.Random(f"{self.shape.seed}:{prompt}")
        return rng.choices(range(10, self.shape.vocabulary), k=self.shape.prompt_tokens)

    def _new_request(self, number: int) -> SoakRequest:
        rng, shape = self._rng, self.shape
        is_quiet = rng.random() < _QUIET_SHARE
        leaves = rng.random() < _LEAVING_SHARE
        return SoakRequest(
            number=number,
            model=shape.models[-1 if is_quiet else 0],
            prompt=rng.randrange(shape.prompts),
            output_tokens=shape.output_tokens,
            leaves_after=rng.randrange(shape.output_tokens // 2) if leaves else None,
        )

    def _gap_s(self, number: int) -> float:
        """Until the next request: exponential, in two phases whose mean is the rate."""
        slow = self.shape.rate * (1 + 1 / _BURST_FACTOR) / 2
        is_burst = number % _CYCLE_REQUESTS >= _CYCLE_REQUESTS // 2
        return self._rng.expovariate(slow * _BURST_FACTOR if is_burst else slow)

    # -- one request ----------------------------------------------------------------------------

    async def _follow(self, request: SoakRequest) -> None:
        """Stream it to its end, again where a fault of the gateway broke it."""
        request.end = None
        while request.end is None:
            request.tries += 1
            request.token_ids = []
            request.sent_ns = request.moved_ns = time.monotonic_ns()
            request.end, request.reason = await self._stream(request)
        if request.token_ids:
            key = request.prompt, tuple(request.token_ids)
            self.outputs[key] = self.outputs.get(key, 0) + 1

    async def _stream(self, request: SoakRequest) -> tuple[SoakEnd | None, str]:
        """One try; no end where it has to be sent once more."""
        try:
            return await self._read(request), ""
        except httpx.TimeoutException:
            return SoakEnd.HUNG, f"nothing came for {_SILENCE_S:g} s"
        except httpx.TransportError as error:
            if self._is_excused(request):
                self.broken += 1
                return None, ""
            return SoakEnd.LOST, f"{type(error).__name__}: {error}"
        except StreamError as error:
            return SoakEnd.LOST, str(error)

    async def _read(self, request: SoakRequest) -> SoakEnd:
        """Raises StreamError where the answer is not a whole one."""
        stream = CompletionStream()
        prompt_ids = self.prompt_ids(request.prompt)
        body = completion_body(request.model, prompt_ids, request.output_tokens)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                message = error_message(await response.aread())
                raise StreamError(f"status {response.status_code}: {message}")
            async for piece in response.aiter_raw():
                request.moved_ns = time.monotonic_ns()
                stream.push(piece, request.moved_ns)
                request.token_ids = stream.token_ids
                if request.leaves_after is not None and (
                    len(stream.token_ids) > request.leaves_after
                ):
                    return SoakEnd.LEFT
        stream.end(request.output_tokens)
        return SoakEnd.DONE

    def _is_excused(self, request: SoakRequest) -> bool:
        """A fault of the gateway was struck while it was under way."""
        struck = any(at_ns >= request.sent_ns for at_ns in self.gateway_faults_ns)
        return struck and request.tries < _TRIES_MAX

    # -- what faults are judged by --------------------------------------------------------------

    def open_since(self, at_ns: int) -> list[SoakRequest]:
        """Requests that were under way at this time and are not over."""
        return [r for r in self.requests if r.end is None and 0 < r.sent_ns <= at_ns]

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return sum(request.end is not None for request in self.requests)

    async def probe(self, model: str) -> bool:
        """A short request is answered now."""
        body = {"model": model, "prompt": [11, 12, 13], "max_tokens": _PROBE_TOKENS}
        try:
            answer = await self._client.post("/v1/completions", json=body)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK
