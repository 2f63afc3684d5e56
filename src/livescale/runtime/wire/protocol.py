"""Messages between the processes of a pool; `wire_channel.py` carries them.

Parameters never travel here: they go worker to worker through `transfer`.
"""

from __future__ import annotations

import enum

import msgspec

from livescale.common.addresses import address_text
from livescale.config.model import ModelConfig
from livescale.messages import attempts, commands, events
from livescale.messages.epochs import Acting, Fenced
from livescale.runtime.wire import joining
from livescale.telemetry.record.record import RequestLine
from livescale.values import types
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Value

JsonSetting = str | int | list[str] | dict[str, dict[str, int | None]] | None
"""A setting of a model, as JSON has it."""


class Address(Value, frozen=True):
    """Where a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_text(self.host, self.port)


class CatalogEntry(Value, frozen=True):
    """A model of the pool, prepared once: where it lies, what it weighs, what its files hash to.
    `warnings` are what an administrator should know though the model can be served."""

    spec: types.ModelSpec
    manifest: types.Manifest
    directory: str
    eos_token_ids: tuple[int, ...]
    request_tokens_max: int
    sampling_defaults: types.SamplingDefaults = types.SamplingDefaults()
    warnings: tuple[str, ...] = ()


# -- hello: the first message of every connection, after the greeting ---------------------------


class Holder(Value, frozen=True):
    """A worker or agent whose data plane can be asked for parameters. Those of one `host` may
    share memory, which they get from `shm_path` (None: they cannot)."""

    ref: types.WorkerRef
    data_address: Address
    host: str
    shm_path: str | None = None


class MemberHello(Value, frozen=True, tag=True):
    """A worker or an agent presents itself to the controller, with what it holds; gateways reach
    a worker at its `token_address`."""

    joined: events.WorkerJoined | events.AgentJoined
    holder: Holder
    token_address: Address | None = None


class GatewayHello(Value, frozen=True, tag=True):
    """A gateway presents itself, to the controller or to a worker. The ids of its requests begin
    with its name (`gateway_rights.py`)."""

    gateway: str


# -- controller to worker and agent --------------------------------------------------------------


class Holders(Value, frozen=True, tag=True):
    """The living workers and agents that the controller knows: meet those that are new."""

    holders: tuple[Holder, ...]


class Order(Value, frozen=True, tag=True):
    """A command for a worker or agent. With one that brings a model comes what only the world
    knows: its manifest, and where its files lie (needed only where a feed reads storage)."""

    command: (
        commands.StartHolding
        | commands.AmendHolding
        | commands.ChangeDuty
        | commands.ReleaseHolding
        | commands.DropHolding
        | commands.SetCores
    )
    manifest: types.Manifest | None = None
    directory: str | None = None


class MayCome(Value, frozen=True, tag=True):
    """The model is served: what takes long to make for it may be made while there is nothing to
    do."""

    manifest: types.Manifest


class Examine(Value, frozen=True, tag=True):
    """Say what your memory holds: gateways ask the controller, which asks all members."""

    call: str


class HeldCopy(Value, frozen=True):
    """A model in a member's memory: the checksum of each layer as its bytes are now (None: not
    there yet)."""

    model: str
    checksums: tuple[str | None, ...]
    rank: int = 0


class Examined(Value, frozen=True, tag=True):
    """What a member's memory holds. The controller passes it on to who asked."""

    call: str
    member: types.WorkerRef
    copies: tuple[HeldCopy, ...]


class Examining(Value, frozen=True, tag=True):
    """The controller's first answer to Examine: an Examined follows from each of these that
    lives on."""

    call: str
    members: tuple[types.WorkerRef, ...]


class Refused(Value, frozen=True, tag=True):
    """The controller will not talk to this incarnation: it must end. A host that is refused for
    what `may_pass` tries again."""

    reason: str
    may_pass: bool = False


# -- controller to gateway -----------------------------------------------------------------------


class Peer(Value, frozen=True):
    """A worker that a gateway can reach."""

    worker: types.WorkerRef
    token_address: Address


class Peers(Value, frozen=True, tag=True):
    """The living workers that the controller knows: open connections to those that are new."""

    peers: tuple[Peer, ...]


class PublishedModel(Value, frozen=True):
    """A model that is in the pool, with its limits: `policy` is what follows from `settings`.

    `is_leaving`: it was withdrawn; running requests finish, new ones are refused.
    `survives_restart`: the pool's next start has it, too, with these limits.
    """

    entry: CatalogEntry
    policy: ModelPolicy
    settings: ModelConfig
    is_leaving: bool = False
    survives_restart: bool = False


class UnservedModel(Value, frozen=True):
    """A model that was kept from an earlier life of the pool and cannot be served: why."""

    settings: ModelConfig
    problem: str


class Catalog(Value, frozen=True, tag=True):
    """All models of the pool, sent to a new gateway and at every change.

    `preparing` lists (name, directory) of models whose files are being read: they are not in the
    pool yet, and may never be. `unserved` models are not in the pool either.
    """

    models: tuple[PublishedModel, ...]
    preparing: tuple[tuple[str, str], ...] = ()
    unserved: tuple[UnservedModel, ...] = ()


class ModelLoad(Value, frozen=True):
    """What a model's instances reported, summed up; all but the first two only grow.

    `device_ns` is how long its instances have held devices, summed up over the devices. Of a stage,
    `came` are Runs that came, with `gaps_ns` between them in all (squares: `gaps_squared_ns_s`),
    and `visits` those that are done, which took `busy_ns`, and had waited for `waited_ns`; `merged`
    of them were carried out together with another one.
    """

    kv_blocks_used: int
    kv_blocks: int
    preemptions: int = 0
    prefix_lookup_tokens: int = 0
    reused_tokens: int = 0
    handovers: int = 0
    handover_bytes: int = 0
    device_ns: int = 0
    visits: int = 0
    busy_ns: int = 0
    waited_ns: int = 0
    came: int = 0
    gaps_ns: int = 0
    gaps_squared_ns_s: int = 0
    merged: int = 0


class SpareStatus(Value, frozen=True):
    """A model's warm spares: how many there are, and their bytes; of `starts` of instances so many
    were `warm_starts`, which used one."""

    copies: int = 0
    bytes: int = 0
    starts: int = 0
    warm_starts: int = 0


class PoolStatus(Value, frozen=True, tag=True):
    """What a gateway shows of the pool: instances per model and state, and per model, role and
    state (`by_role`), the workers that are there and those that the models' loads need
    (`workers_wanted`), the loads.

    `copies` counts each model's complete copies in host memory. `unready` lists the models that
    have less than they should have at least: a serving instance, or, where the minimum is 0, a
    copy to start one from. The pool is ready when there are none. `problems` says of models why
    they cannot be loaded now, `failed_loads` counts loads that failed, by model; so `spares`.
    `is_recording` says whether the run record is being written (False: it could not be any more;
    None: none was asked for). `decisions` has of each model, or stage, the last one about how many
    instances it has.
    """

    instances: dict[str, dict[str, int]]
    workers: int
    loads: dict[str, ModelLoad]
    agents: int = 0
    copies: dict[str, int] = msgspec.field(default_factory=dict)
    unready: tuple[str, ...] = ()
    problems: dict[str, str] = msgspec.field(default_factory=dict)
    failed_loads: dict[str, int] = msgspec.field(default_factory=dict)
    spares: dict[str, SpareStatus] = msgspec.field(default_factory=dict)
    is_recording: bool | None = None
    workers_wanted: int = 0
    by_role: dict[str, dict[str, dict[str, int]]] = msgspec.field(default_factory=dict)
    decisions: dict[str, str] = msgspec.field(default_factory=dict)


class ModelProblem(enum.StrEnum):
    """Why a model was not added, changed or removed."""

    INVALID = "invalid"  # the directory or a setting is wrong, or it does not fit
    EXISTS = "exists"  # a model of this name is there, or being prepared
    UNKNOWN = "unknown"  # no model of this name is there
    FAILED = "failed"  # the pool could not carry it out


class ModelAnswer(Value, frozen=True, tag=True):
    """The one answer to AddModel, ChangeModel or RemoveModel. `problem` None: it is done.

    An added model has its host copy by then (or needs none); a removed one takes no new requests.
    """

    call: str
    name: str
    problem: ModelProblem | None = None
    reason: str = ""


class ModelFilePart(Value, frozen=True, tag=True):
    """The one answer to ReadModelFile: the bytes from there on, of a file that has `size_bytes`
    (None: the model has no such file, or it cannot be read)."""

    call: str
    content: bytes
    size_bytes: int | None


# -- gateway to worker, worker to gateway --------------------------------------------------------


class Submit(Value, frozen=True, tag=True):
    """Run this attempt. `generated_ids` were emitted by earlier attempts."""

    request: types.RequestId
    attempt: int
    instance: types.InstanceId
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    sampling: types.SamplingParams


class Token(Value, frozen=True, array_like=True):
    """One generated token of one attempt; the first one tells of the prompt's cached tokens.

    `embedding` has the values that were asked for in the token's place: fp32, little-endian.
    """

    request: types.RequestId
    attempt: int
    index: int
    token_id: int
    finish_reason: types.FinishReason | None
    logprobs: types.TokenLogprobs | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None


class Tokens(Value, frozen=True, tag=True):
    """What one Run generated for this gateway."""

    tokens: tuple[Token, ...]


# -- gateway to controller -----------------------------------------------------------------------


class RequestTimed(Value, frozen=True, tag=True):
    """A request is over: its line for the run record."""

    line: RequestLine


class AddModel(Value, frozen=True, tag=True):
    """Publish the model in `path`. `call` names the question; exactly one ModelAnswer follows.

    `settings` are keys of `models:` in the configuration other than path and name, as JSON has
    them; what is wrong with them is said in the answer.
    """

    call: str
    path: str
    name: str = ""
    settings: dict[str, JsonSetting] = msgspec.field(default_factory=dict)


class ChangeModel(Value, frozen=True, tag=True):
    """Give the model other limits: keys as in AddModel. Exactly one ModelAnswer follows."""

    call: str
    name: str
    settings: dict[str, JsonSetting]


class RemoveModel(Value, frozen=True, tag=True):
    """Withdraw the model. `call` names the question; exactly one ModelAnswer follows."""

    call: str
    name: str


class ReadModelFile(Value, frozen=True, tag=True):
    """Send a part of a file that the model's text is tokenized with, from this byte on: the gateway
    does not have the model's directory. Exactly one ModelFilePart follows."""

    call: str
    model: str
    file: str
    offset: int


AgentEvent = (
    events.LayerArrived
    | events.HoldingCompleted
    | events.HoldingFailed
    | events.HoldingDropped
    | events.FeedFailed
    | events.LinkMeasured
)
WorkerEvent = (
    AgentEvent
    | events.FirstByteArrived
    | events.LiveStarted
    | events.RoleChanged
    | events.CoresChanged
    | events.InstanceReported
    | events.BatchTaken
    | events.KvTaken
    | events.TeamBroke
    | events.CapacityMeasured
    | events.RequestEnded
)
FromGateway = (
    events.RequestArrived
    | events.RequestCancelled
    | events.RequestEnded
    | RequestTimed
    | AddModel
    | ChangeModel
    | RemoveModel
    | ReadModelFile
    | Examine
)
ToController = (
    MemberHello
    | GatewayHello
    | joining.HostHello
    | joining.GatewayJoins
    | WorkerEvent
    | FromGateway
    | Examined
    | joining.Farewell
    | Fenced
)
ToWorker = Acting | Holders | Order | Examine | MayCome | Refused
ToHost = (
    Acting
    | joining.Welcome
    | joining.GatewayWelcome
    | Refused
    | joining.Farewell
    | joining.RevokedMembers
)
ToGateway = (
    Acting
    | Peers
    | Catalog
    | commands.Dispatch
    | commands.FailRequest
    | PoolStatus
    | ModelAnswer
    | ModelFilePart
)
ToExaminer = ToGateway | Examining | Examined
ToTokenServer = GatewayHello | Submit | attempts.Cancel | attempts.Disown
FromTokenServer = Tokens | attempts.AttemptTaken | attempts.AttemptReturned | attempts.AttemptFailed
AnyMessage = (
    ToController
    | ToWorker
    | ToHost
    | ToExaminer
    | ToTokenServer
    | FromTokenServer
    | events.AnyEvent
)
