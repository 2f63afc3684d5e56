"""What the gateway needs from the rest of LiveScale: a Backend that turns ids into tokens.

Only protocols, the values that cross them and their errors live here. No HTTP, no text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from livescale.types import (
    FinishReason,
    RequestId,
    SamplingDefaults,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as clients see it.

    `model_tokens_max` bounds prompt and generated tokens together; `directory` holds the
    tokenizer files (tokenizer.json, tokenizer_config.json, chat_template.jinja).
    """

    name: str
    model_tokens_max: int
    created_s: int
    eos_token_ids: tuple[int, ...]
    directory: Path
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request: the prompt is not empty and fits the model with all its output.

    `request` is unique among all requests of this gateway; `client_request_id` is what the client
    sent as X-Request-Id, for logs only (nothing keeps clients from sending the same twice).
    """

    request: RequestId
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    client_request_id: str | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The `index`-th generated token (0 is the first); the last one carries `finish_reason`."""

    index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One current amount for /metrics: a counter if its name ends in `_total`, else a gauge."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


class QueueFull(Exception):
    """The pool holds as many requests as it may; the client should come back later."""

    def __init__(self, retry_after_s: float, reason: str = "too many requests are waiting") -> None:
        super().__init__(f"{reason}, retry after {retry_after_s:.3g} s")
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """The pool cannot take requests now; the message says why."""


class GenerationFailed(Exception):
    """An accepted request ended without all its tokens; the message is for the client."""


class TokenStream(Protocol):
    """The tokens of one accepted request.

    Iteration yields TokenChunks with consecutive indices and ends after the one that carries
    `finish_reason`; it raises GenerationFailed when the request cannot be finished. `queued_s` is
    how long it waited for an instance (None: no instance has taken it yet).
    """

    @property
    def queued_s(self) -> float | None: ...

    def __aiter__(self) -> AsyncIterator[TokenChunk]: ...

    def cancel(self) -> None:
        """Free everything the request holds, at once. Idempotent; harmless after the end."""

    def stop(self) -> None:
        """Like `cancel`, but the request counts as finished: its text is complete."""


class Backend(Protocol):
    """The rest of LiveScale, as the gateway sees it. All methods return at once."""

    def models(self) -> tuple[ModelCard, ...]:
        """The models on offer; asked once, when the application is created."""

    def is_ready(self) -> bool:
        """True when requests are accepted (the answer of /health)."""

    def admit(self, model: str, requests: int, prompt_tokens: int) -> AbstractContextManager[None]:
        """Hold places for requests that are being tokenized: together about so many tokens.

        Entering raises QueueFull or Unavailable. The places are given back on leaving; `submit`
        takes them anew, then with the exact number.
        """

    def submit(self, requests: Sequence[GenerateRequest]) -> Sequence[TokenStream]:
        """Accept all of the requests, which are one client's to one model, or none.

        Raises QueueFull or Unavailable.
        """

    def readings(self) -> list[Reading]:
        """Current amounts for /metrics; names without prefix, models in the label `model`."""
