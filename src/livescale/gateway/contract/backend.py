"""What the gateway needs from the rest of LiveScale: a Backend that turns ids into tokens.

Only protocols, the values that cross them and their errors live here. No HTTP, no text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from livescale.config.model import RolesConfig
from livescale.values.types import (
    FinishReason,
    RequestId,
    SamplingDefaults,
    SamplingParams,
    TokenLogprobs,
)

SettingValue = str | int | list[str] | dict[str, dict[str, int | None]] | None
"""A setting of a model, as JSON has it."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as clients see it.

    `model_tokens_max` bounds prompt and generated tokens together; `directory` holds the
    files that a tokenizer is read from (`TEXT_FILES`). Embeddings have
    `embedding_size` values (0: the model gives none).
    """

    name: str
    model_tokens_max: int
    created_s: int
    eos_token_ids: tuple[int, ...]
    directory: Path
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding_size: int = 0


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends requests, as far as the gateway knows: clients share the pool, whatever each of
    them sends. `name` never holds a key; a turn of the client is worth `weight` requests."""

    name: str = ""
    weight: int = 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request: the prompt is not empty and fits the model with all its output.

    `request` is unique among all requests of this gateway; `client_request_id` is what the client
    sent as X-Request-Id, for logs only (nothing keeps clients from sending the same twice).
    `arrived_ns` is when its HTTP request arrived, on the monotonic clock.
    """

    request: RequestId
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    client_request_id: str | None = None
    arrived_ns: int | None = field(default=None, compare=False)
    client: Client = Client()


class TokenChunk(Protocol):
    """The `index`-th generated token (0 is the first); the last one carries `finish_reason`.

    The first one has `cached_tokens`: those of the prompt that were not computed for it. Where an
    embedding was asked for, the one token brings it (fp32, little-endian) and means nothing.
    """

    @property
    def index(self) -> int: ...
    @property
    def token_id(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def logprobs(self) -> TokenLogprobs | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def embedding(self) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One current amount for /metrics: a counter if its name ends in `_total`, else a gauge.

    One that `is_own` is of this gateway's requests alone; others are the pool's, whichever gateway
    shows them.
    """

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    is_own: bool = False


class ModelPhase(enum.StrEnum):
    """Where a model is on its way through the pool, as administrators see it."""

    PREPARING = "preparing"  # its files are being read; it may never come into the pool
    COPYING = "copying"  # no instance, and no copy in host memory yet to start one from
    AT_ZERO = "at_zero"  # no instance: the next request starts one
    STARTING = "starting"  # instances that do not serve yet
    SERVING = "serving"
    LEAVING = "leaving"  # withdrawn: running requests finish, new ones are refused
    FAILED = "failed"  # kept from an earlier life of the pool, and cannot be served


class AdministeredUsage(msgspec.Struct):
    """What a model's requests were, and what they took, since the gateway started.

    `requests` are over; `slo_met` is absent without an SLO that gives times. `device_seconds` count
    from the start of the controller, summed up over the devices that instances have held.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    device_seconds: float = 0.0
    slo_met: int | msgspec.UnsetType = msgspec.UNSET


class ModelStatus(msgspec.Struct):
    """A model as administrators see it: one of GET /admin/models. `instances` counts them by state,
    `instances_by_role` those of each role apart. The limits of a model with `roles` are their sums;
    those of a model with stages are each stage's, of which `instances_by_stage` counts instances,
    and `decisions_by_stage` has the last decision about their number ("" if there was none).

    `host_copies` are complete copies in host memory, `warm_spares` those that released instances
    left on devices. `survives_restart`: the pool's next start has
    the model as it is now. `problem`: why it is not served, or cannot be loaded now; `warnings`:
    what should be known though it is. Of `usage` a Backend knows the `device_seconds` only.
    """

    name: str
    path: str
    state: ModelPhase
    instances: Mapping[str, int] = msgspec.field(default_factory=dict)
    instances_by_role: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    instances_by_stage: Sequence[Mapping[str, int]] = ()
    decisions_by_stage: Sequence[str] = ()
    host_copies: int = 0
    warm_spares: int = 0
    usage: AdministeredUsage = msgspec.field(default_factory=AdministeredUsage)
    min_replicas: int | None = None
    max_replicas: int | None = None
    priority: int | None = None
    idle_s: int | None = None
    target_ongoing_requests: int | None = None
    schedule: str = ""
    roles: RolesConfig | None = None
    max_model_tokens: int | None = None
    survives_restart: bool = False
    problem: str | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NewModel:
    """A model to be published: its directory, and keys of `models:` in the configuration."""

    directory: str
    name: str
    settings: Mapping[str, SettingValue]


class ModelRefused(Exception):
    """A model was not added, changed or removed; the message is the reason.

    `problem`: "invalid" (the directory or a setting is wrong, or it does not fit), "exists",
    "unknown" (there is no such model) or "failed" (the pool could not carry it out).
    """

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


class ModelWithdrawn(Exception):
    """The model is not offered any more; the message is its name."""


class QueueFull(Exception):
    """The pool holds as many requests as it may; the client should come back later."""

    def __init__(self, retry_after_s: float, reason: str = "too many requests are waiting") -> None:
        super().__init__(f"{reason}, retry after {retry_after_s:.3g} s")
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """The pool cannot take requests now; the message is the reason."""


class GenerationFailed(Exception):
    """An accepted request ended without all its tokens; the message is for the client."""


class NoInstance(GenerationFailed):
    """The request was taken by no instance; the client should come back later.

    `code` is why: "queue_timeout" (none took it in the time that one may wait), or "load_failed"
    (the model cannot be loaded now, and no instance of it is there; it is tried again soon).
    """

    def __init__(self, message: str, retry_after_s: float, code: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class TokenSink(Protocol):
    """Gets the tokens of one request. Its methods return at once and call nothing of the Backend:
    they may be called while that is at work on the request."""

    def take(self, chunk: TokenChunk) -> None:
        """The next token: indices are consecutive, and the last one carries `finish_reason`."""

    def end(self, failure: Exception | None) -> None:
        """No more tokens come. A GenerationFailed is why the request cannot be finished."""


class TokenStream(Protocol):
    """The tokens of one accepted request. `queued_s` is how long it waited for an instance (None:
    no instance has taken it yet)."""

    @property
    def queued_s(self) -> float | None: ...

    def pour(self, sink: TokenSink) -> None:
        """Each token goes to the sink in the call that brings it, and so does the end. Called once,
        in the turn of the event loop in which the request was submitted."""

    def cancel(self) -> None:
        """Free everything the request holds, at once. Idempotent; harmless after the end."""

    def stop(self) -> None:
        """Like `cancel`, but the request counts as finished: its text is complete."""


class Backend(Protocol):
    """The rest of LiveScale, as the gateway sees it. Methods that are not async return at once."""

    def models(self) -> tuple[ModelCard, ...]:
        """The models on offer now: those that take new requests. Equal cards mean no change."""

    def watch_models(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on the event loop, whenever `models` or `model_states` lists others."""

    def model_states(self) -> tuple[ModelStatus, ...]:
        """All models: those on offer, those being prepared and those that are leaving."""

    async def add_model(self, model: NewModel) -> str:
        """Publish a model; returns its name when it is in the pool and has its host copy.

        Raises ModelRefused or Unavailable.
        """

    async def change_model(self, name: str, settings: Mapping[str, SettingValue]) -> None:
        """Give a model other limits (keys of CHANGEABLE_SETTINGS); returns when they hold.

        Raises ModelRefused or Unavailable.
        """

    async def remove_model(self, name: str) -> None:
        """Withdraw a model; returns when it takes no new requests. Running ones finish.

        Raises ModelRefused or Unavailable.
        """

    def is_ready(self) -> bool:
        """True when requests are accepted (the answer of /health)."""

    def admit(
        self, model: str, requests: int, prompt_tokens: int, client: Client
    ) -> AbstractContextManager[None]:
        """Hold places for the client's requests that are being tokenized: together about so many
        tokens.

        Entering raises QueueFull, Unavailable or ModelWithdrawn. The places are given back on
        leaving; `submit` takes them anew, then with the exact number.
        """

    def submit(self, requests: Sequence[GenerateRequest]) -> Sequence[TokenStream]:
        """Accept all of the requests, which are one client's to one model, or none.

        Raises QueueFull, Unavailable or ModelWithdrawn.
        """

    def readings(self) -> list[Reading]:
        """Current amounts for /metrics; names without prefix, models in the label `model`."""
