"""Who may wait: one bounded line per model, and when a refused client should come back.

Pure: time is an argument. The caller, who knows when a request begins to wait and when an instance
takes it, keeps a line (`runtime/gateway_process/pool_backend.py`); nothing here knows requests,
HTTP or tokenizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from livescale.common.fair_line import FairLine
from livescale.gateway.contract.backend import ModelWithdrawn, QueueFull, Unavailable
from livescale.gateway.contract.errors import come_back, model_not_found, unavailable

PROMPT_BYTES_PER_TOKEN = 4
"""UTF-8 bytes of a token, roughly and for most tokenizers: good enough to refuse before work."""
PACE_INTERVALS = 32
"""So many of the latest intervals between two requests that moved on make the line's pace."""
RETRY_UNKNOWN_S = 1.0
"""The wait that is named while no request has moved on yet."""
RETRY_RANGE_S = (0.05, 60.0)
"""Clients do not wait longer than a minute, and must not spin."""


def estimated_prompts(prompts: Sequence[str | list[int]], tokens_max: int) -> list[int]:
    """About how many tokens each prompt has; `tokens_max` if it seems to have more: it would be
    refused, so it must not fill the line until that is known."""
    return [
        min(
            tokens_max,
            estimated_tokens(prompt) if isinstance(prompt, str) else len(prompt),
        )
        for prompt in prompts
    ]


def estimated_tokens(prompt: str) -> int:
    """About how many tokens the text has, without tokenizing it; at least 1."""
    # isascii is a flag of the string: the usual long prompt is not even read.
    size_bytes = len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "replace"))
    return max(1, size_bytes // PROMPT_BYTES_PER_TOKEN)


@contextmanager
def refusals_answered() -> Iterator[None]:
    """What a Backend raises inside to refuse a request leaves as an ApiError (503, 404)."""
    try:
        yield
    except QueueFull as full:
        raise come_back(str(full), full.retry_after_s) from full
    except Unavailable as reason:
        raise unavailable(str(reason)) from reason
    except ModelWithdrawn as gone:
        raise model_not_found(str(gone)) from gone


class AtMost:
    """Work of one kind that is refused when so much of it is under way. Lives on an event loop."""

    def __init__(self, most: int, problem: str, retry_after_s: float) -> None:
        self._most = most
        self._problem = problem
        self._retry_after_s = retry_after_s
        self._under_way = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises ApiError (503)."""
        if self._under_way >= self._most:
            raise come_back(self._problem, self._retry_after_s)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class WaitingLine(FairLine):
    """The requests of one model that no instance has taken yet: how many, how many prompt tokens,
    and of which clients, who share the line (see `common/fair_line.py`).

    All calls take O(1). The wait of a refused client is what those before it will take at the pace
    of the last ones: their number times the mean interval between two that moved on, counted only
    while requests waited, so that an idle hour is no slow pace.
    """

    def __init__(self, requests_max: int, prompt_tokens_max: int | None) -> None:
        super().__init__(requests_max, prompt_tokens_max)
        self._intervals_s: deque[float] = deque(maxlen=PACE_INTERVALS)
        #: when the present interval began: the last one moved on, or a request began to wait
        self._since_s = 0.0

    def check(self, client: str, requests: int, prompt_tokens: int, now_s: float) -> None:
        """There is room for so many more of the client's. Raises QueueFull."""
        if not self.takes_requests(client, requests):
            raise QueueFull(self.wait_s(client, now_s))
        if not self.takes_prompt_tokens(client, prompt_tokens):
            raise QueueFull(self.wait_s(client, now_s), "too many prompt tokens are waiting")

    def join(self, client: str, prompt_tokens: int, now_s: float, requests: int = 1) -> None:
        """They wait from now on, checked or not (a request whose worker is lost waits again)."""
        if not self.requests:
            self._since_s = now_s
        self.add(client, requests, prompt_tokens)

    def leave(self, client: str, prompt_tokens: int, requests: int = 1) -> None:
        """They wait no longer, for whatever reason."""
        self.remove(client, requests, prompt_tokens)

    def move_on(self, client: str, prompt_tokens: int, now_s: float) -> None:
        """An instance takes one of them."""
        self.leave(client, prompt_tokens)
        self._intervals_s.append(now_s - self._since_s)
        self._since_s = now_s

    @contextmanager
    def holding(
        self, client: str, requests: int, prompt_tokens: int, now_s: float
    ) -> Iterator[None]:
        """Places are taken for a request that is still being read. Raises QueueFull."""
        self.check(client, requests, prompt_tokens, now_s)
        self.join(client, prompt_tokens, now_s, requests)
        try:
            yield
        finally:
            self.leave(client, prompt_tokens, requests)

    def wait_s(self, client: str, now_s: float) -> float:
        """How long the client's waiting requests will take, by what was measured: with each of them
        one of every other client moves on. Of a client that has none: how long all will."""
        intervals_s = self._intervals_s
        if not intervals_s:
            return RETRY_UNKNOWN_S
        mean_s = sum(intervals_s) / len(intervals_s)
        open_s = now_s - self._since_s
        if open_s > mean_s:  # it has become slower than it was
            mean_s = (mean_s * len(intervals_s) + open_s) / (len(intervals_s) + 1)
        turns = self.requests_of(client) * self.clients or self.requests
        least_s, most_s = RETRY_RANGE_S
        return min(max(min(turns, self.requests) * mean_s, least_s), most_s)
