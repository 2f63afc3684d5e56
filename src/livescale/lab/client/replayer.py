"""The open-loop replayer: sends each request of a trace when it is due, whatever has come back.

Talks streaming HTTP to any server with OpenAI's completions and `return_token_ids`. Reading
traces and judging results (SLOs, summaries) live elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from livescale.config.slo import RequestTiming, percentile
from livescale.lab.client.completion import (
    CompletionStream,
    StreamError,
    completion_body,
    error_message,
)
from livescale.load.traces import TraceRow
from livescale.values.units import NS_PER_S

_CONNECT_S = 10
_ERROR_BODY_BYTES_MAX = 64 << 10
_ENDPOINT = "/v1/completions"
_KEEPALIVE_S = 2
"""Shorter than servers keep idle connections (5 s is usual): none closes while it is reused."""

PromptIdsFor = Callable[[int, TraceRow], list[int]]
"""The prompt of the index-th row; as many token ids as the row has input tokens."""


@dataclass(slots=True)
class ReplayResult:
    """What became of one row. Times are CLOCK_MONOTONIC; `token_ns` has one per token.

    `sent_ns` is when the client began to send. `status` is None if no response came. `error` says
    why the request failed and is None if all its tokens came.
    """

    index: int
    prompt_ids: list[int]
    output_tokens: int
    scheduled_ns: int
    sent_ns: int = 0
    finished_ns: int = 0
    status: int | None = None
    request_id: str | None = None
    error: str | None = None
    token_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error is None

    def timing(self) -> RequestTiming:
        """What SLOs and summaries want to know of it."""
        return RequestTiming(
            request=self.request_id or f"row-{self.index}",
            scheduled_ns=self.scheduled_ns,
            sent_ns=self.sent_ns,
            token_ns=tuple(self.token_ns),
            finished_ns=self.finished_ns,
            ok=self.ok,
        )

    def __repr__(self) -> str:
        tokens = f"{len(self.token_ids)}/{self.output_tokens} tokens"
        return f"<ReplayResult {self.index} {self.error or 'ok'}, {tokens}>"


def lateness_ns(results: Sequence[ReplayResult], percent: int) -> int | None:
    """A percentile of how far the client itself fell behind: sent minus scheduled, over all
    requests; None if nothing was sent.

    If it is not small against the latencies measured, the client was the bottleneck.
    """
    late_ns = [result.sent_ns - result.scheduled_ns for result in results]
    return percentile(late_ns, percent) if late_ns else None


def prompts_from_seed(vocab_size: int, seed: int) -> PromptIdsFor:
    """Random prompts that depend on the seed and the row's index only."""

    def prompt_ids_for(index: int, row: TraceRow) -> list[int]:
        return random.Random(f"{seed}:{index}").choices(range(vocab_size), k=row.input_tokens)

    return prompt_ids_for


async def replay(
    base_url: str,
    model: str,
    rows: Sequence[TraceRow],
    *,
    prompt_ids_for: PromptIdsFor,
    on_progress: Callable[[ReplayResult], None] | None = None,
    drain_ns_max: int = 120 * NS_PER_S,
) -> list[ReplayResult]:
    """Send every row at its arrival time after now; one result per row, in the order of rows.

    Open loop: a send waits for nothing that an earlier request does, and there is no limit on
    connections (the process's limit on open files is one: a request beyond it fails). Whatever
    goes wrong with a request becomes its result's `error`. `on_progress` gets each result when it
    is complete; after a cancellation these are all there is, and every connection is closed. The
    replay ends at most `drain_ns_max` after its last arrival was due.
    """
    # Neither proxies nor credentials of the environment belong into a measurement.
    async with (
        httpx.AsyncClient(
            base_url=base_url,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        start_ns = time.monotonic_ns()  # the client exists: making it takes tens of milliseconds
        last_ns = rows[-1].arrival_ns if rows else 0
        sender = _Sender(client, model, start_ns + last_ns + drain_ns_max, on_progress)
        results = []
        for index, row in enumerate(rows):
            # The prompt is made before the request is due, so that it costs no lateness.
            result = ReplayResult(
                index, prompt_ids_for(index, row), row.output_tokens, start_ns + row.arrival_ns
            )
            body = sender.body(result)
            await _sleep_until(result.scheduled_ns)
            results.append(result)
            tasks.create_task(sender.send(result, body))
    return results


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(slots=True)
class _Sender:
    """Sends single requests and fills in their results."""

    client: httpx.AsyncClient
    model: str
    deadline_ns: int
    on_progress: Callable[[ReplayResult], None] | None

    def body(self, result: ReplayResult) -> bytes:
        return msgspec.json.encode(
            completion_body(self.model, result.prompt_ids, result.output_tokens)
        )

    async def send(self, result: ReplayResult, body: bytes) -> None:
        """Send one request and take its answer; the result is complete afterwards."""
        result.sent_ns = time.monotonic_ns()
        stream = CompletionStream()
        try:
            async with asyncio.timeout((self.deadline_ns - result.sent_ns) / NS_PER_S):
                await self._exchange(result, body, stream)
        except TimeoutError:
            result.error = "not finished when the replay's time was over"
        except StreamError as error:
            result.error = str(error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.finished_ns = time.monotonic_ns()
        result.token_ids, result.token_ns = stream.token_ids, stream.token_ns
        if self.on_progress is not None:
            self.on_progress(result)

    async def _exchange(self, result: ReplayResult, body: bytes, stream: CompletionStream) -> None:
        async with self.client.stream(
            "POST", _ENDPOINT, content=body, headers={"Content-Type": "application/json"}
        ) as response:
            result.status = response.status_code
            result.request_id = response.headers.get("X-Request-Id")
            if response.status_code != httpx.codes.OK:
                raise StreamError(
                    f"HTTP {response.status_code}: {error_message(await _body_start(response))}"
                )
            async for piece in response.aiter_bytes():
                stream.push(piece, time.monotonic_ns())
        stream.end(result.output_tokens)


async def _body_start(response: httpx.Response) -> bytes:
    """The body, or as much of it as an error message may have."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _ERROR_BODY_BYTES_MAX:
            break
    return body


async def _sleep_until(due_ns: int) -> None:
    # At least one turn of the loop even if the request is due: answers must be read meanwhile.
    await asyncio.sleep(0)
    while (wait_ns := due_ns - time.monotonic_ns()) > 0:
        await asyncio.sleep(wait_ns / NS_PER_S)
