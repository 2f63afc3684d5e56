"""The words of LiveScale as values: models, layers, instances, requests, chains.

Ground floor: frozen values and their own arithmetic live here. No I/O, no clocks, no decisions.
Amounts are integers with their unit in the name (`_ns`, `_bytes`, `_tokens`).
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

RequestId = str
"""The name of the gateway that answers for the request, "-", and a number."""

InstanceId = int
PlanId = int
IDS_PER_EPOCH = 1_000_000_000
"""A life of the controller numbers its plans and instances from its epoch times this on: more than
it can need in years, so that no number is given again by the next one."""

SEQUENCES_MAX = 64
"""Requests that an instance computes at once, its places, unless something else is configured."""

LAYOUT_VERSION = 1
"""Changes whenever the bytes of an arena are laid out differently for the same model."""


def gateway_of(request: RequestId) -> str:
    """The name of the gateway that answers for the request."""
    return request.rpartition("-")[0]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every plain value: immutable, comparable, encodable, strict when decoded."""


class LayerSpan(Value, frozen=True, order=True):
    """The layers `[start, stop)`: 0 is the embedding, 1…L the decoder layers, L+1 the head."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"LayerSpan [{self.start}, {self.stop}) is empty or negative")

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def decoder_layers(self, layers: int) -> int:
        """How many of the span's layers are neither the embedding nor the head of a model of
        `layers` layers."""
        return max(0, min(self.stop, layers - 1) - max(self.start, 1))

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class StageOf(Value, frozen=True):
    """Which layers of a model a stage has: it is `number` of `count`.

    A stage is described as a model: layer 0, decoder layers, a last layer. Its layer n is the
    model's layer `first_layer + n`. Layer 0 has no bytes in other stages than the first, and the
    last layer none in other stages than the last.
    """

    model: str
    number: int
    count: int
    first_layer: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def span(self, layers: int) -> LayerSpan:
        """The layers of the model that the stage runs, which has `layers` of its own."""
        start = self.first_layer + (not self.is_first)
        return LayerSpan(start, self.first_layer + layers - (not self.is_last))


class TensorEntry(Value, frozen=True):
    """One tensor of a layer as its module uses it.

    `name` is relative to the layer's module (`self_attn.q_proj.weight`), `offset_bytes` is
    relative to the start of the layer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class LayerEntry(Value, frozen=True):
    """One layer's bytes: where they lie in the arena, what they hold and what they hash to.

    `checksum` is xxh3-64 (cheap, verified on every hop); `content_hash` is SHA-256 (identity of
    the bytes, verified once per copy in host memory and where they came over a network).
    """

    layer: int
    offset_bytes: int
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    checksum: str
    content_hash: str


class Manifest(Value, frozen=True):
    """Everything a worker needs to know about a model's bytes without opening its directory. The
    configuration is the whole model's, also in that of a `stage`."""

    model: str
    config_json: str
    dtype: str
    layers: tuple[LayerEntry, ...]
    tp_size: int = 1
    tp_rank: int = 0
    layout_version: int = LAYOUT_VERSION
    stage: StageOf | None = None

    @property
    def id(self) -> str:
        """Hash of config, dtype, TP size and rank, layout version, and which layers of the model
        these are (16 hex digits)."""
        parts: tuple[object, ...] = (
            self.config_json,
            self.dtype,
            self.tp_size,
            self.tp_rank,
            self.layout_version,
        )
        if self.stage is not None:
            parts = (*parts, self.stage.first_layer, len(self.layers))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def size_bytes(self) -> int:
        """Bytes of arena that the model occupies, alignment included."""
        last = self.layers[-1]
        return last.offset_bytes + last.size_bytes

    @property
    def span(self) -> LayerSpan:
        """The span of all layers."""
        return LayerSpan(0, len(self.layers))


class ModelSpec(Value, frozen=True):
    """What the control plane knows of a model: sizes only, never bytes.

    `layer_bytes` and `kv_bytes_per_token` are those of one rank: an instance takes `tp_size`
    workers, one per tensor-parallel rank. A token's hidden row has `row_bytes_per_token`. A tied
    head computes with the embedding's matrix: with layer 0. A stage of a model is a model to all
    that loads, keeps and counts bytes.
    """

    name: str
    layer_bytes: tuple[int, ...]
    kv_bytes_per_token: int
    model_tokens_max: int
    tp_size: int = 1
    row_bytes_per_token: int = 0
    is_tied: bool = False
    stage: StageOf | None = None

    @property
    def offered_as(self) -> str:
        """The model that clients ask for."""
        return self.name if self.stage is None else self.stage.model

    @property
    def layers(self) -> int:
        """Number of layers, embedding and head included."""
        return len(self.layer_bytes)

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)


AGENT_NUMBERS_FROM = 1 << 24
"""Host agents are numbered from here, so that one kind of reference names every holder."""


class WorkerRef(Value, frozen=True, order=True):
    """A worker in one of its lives: a restarted worker has the next incarnation.

    Host agents, which hold copies in host memory, are named the same way with numbers from
    AGENT_NUMBERS_FROM on: whatever moves or counts copies treats both alike.
    """

    worker: int
    incarnation: int = 0

    @property
    def is_agent(self) -> bool:
        return self.worker >= AGENT_NUMBERS_FROM

    def __str__(self) -> str:
        if self.is_agent:
            return f"h{self.worker - AGENT_NUMBERS_FROM}.{self.incarnation}"
        return f"w{self.worker}.{self.incarnation}"


def agent_ref(host: int, incarnation: int = 0) -> WorkerRef:
    """The agent of the host with this number."""
    return WorkerRef(AGENT_NUMBERS_FROM + host, incarnation)


class HoldingId(Value, frozen=True, order=True):
    """What `member` gets by `plan`, of which a plan brings at most one to each member."""

    plan: PlanId
    member: WorkerRef

    def __str__(self) -> str:
        return f"{self.plan}@{self.member}"


class Role(enum.StrEnum):
    """What part of a request's life an instance serves."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class Part(Value, frozen=True, order=True):
    """What instances that can replace one another serve: some layers of a model, in one role."""

    model: str
    span: LayerSpan
    role: Role = Role.UNIFIED

    def __str__(self) -> str:
        return self.model if self.role is Role.UNIFIED else f"{self.model} ({self.role})"


class InstanceState(enum.StrEnum):
    """Life of an instance; the allowed moves are the table in `control/state/instance.py`."""

    STARTING = "starting"
    LOADING = "loading"
    LIVE = "live"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class Outcome(enum.StrEnum):
    """How one attempt at a request ended. RETURNED: the instance gave it back, and it is not the
    request's fault."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    WORKER_LOST = "worker_lost"
    RETURNED = "returned"


class FinishReason(enum.StrEnum):
    """Why generation stopped, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(Value, frozen=True):
    """How tokens are chosen and when generation ends.

    `output_tokens_max` counts generated tokens; before `output_tokens_min` of them no stop token is
    chosen. `stop_token_ids` includes the model's EOS ids unless `ignore_eos`. A `temperature` of 0
    is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing. The frequency and presence penalties
    look at generated tokens, the repetition penalty at the prompt, too. The noise of a choice is a
    function of `seed` and the token's position only. `logit_bias` lists (token id, bias).
    `logprobs` is how many likely tokens are reported beside each chosen one (None: no logprobs).
    With `embeds` the request ends with its prompt: its one token means nothing and brings the mean
    of the prompt's last hidden rows (`output_tokens_max` is 1).
    """

    output_tokens_max: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    output_tokens_min: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    embeds: bool = False


class SamplingDefaults(Value, frozen=True):
    """What a model's authors recommend (generation_config.json) where a request gives no value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class TokenLogprobs(Value, frozen=True, array_like=True):
    """Natural logarithms of the probabilities that the model gave, before anything changed them.

    `chosen` is the chosen token's; `top` lists (token id, logprob), the most likely first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class FromStorage(Value, frozen=True, tag="storage"):
    """Read the layers from the model's directory (the only holder that is always there)."""

    def __str__(self) -> str:
        return "storage"


class FromWorker(Value, frozen=True, tag="worker"):
    """Receive the layers from another worker's arena."""

    worker: WorkerRef

    def __str__(self) -> str:
        return str(self.worker)


Upstream = FromStorage | FromWorker
