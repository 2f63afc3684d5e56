"""Events: everything the controller is ever told. Sizes and ids only, never prompts or tensors.

Each command of `messages.commands` that does something ends in exactly one *terminal* event:

| command | terminal event |
| --- | --- |
| StartHolding | HoldingCompleted or HoldingFailed |
| DropHolding | HoldingDropped |
| SetCores | CoresChanged |
| Dispatch | RequestEnded |

If the member who should report dies, WorkerLost answers in its place. The others are news.
"""

from __future__ import annotations

from livescale.clusters.topology import Device, Host
from livescale.messages.commands import StartHolding
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import HoldingId, InstanceId, Outcome, RequestId, Role, Value, WorkerRef


class Event(Value, frozen=True, tag=True):
    """Base of all events."""


class HoldingReport(Value, frozen=True):
    """What a member already holds, or is getting, when it joins (a restarted controller starts from
    these): the `order` as it was amended last, without feeds if everything `is_whole`. All of the
    span's layers below `watermark` are there, and those `beyond`. Of a warm spare (`is_spare`) the
    order still has the duty that was taken away: it names the other ranks.
    """

    order: StartHolding
    watermark: int
    is_whole: bool
    is_spare: bool = False
    beyond: tuple[int, ...] = ()


class WorkerJoined(Event, frozen=True):
    """A warm worker is ready for orders. It computes with `cores`, and began with `own_cores`. An
    instance on one that `is_engine` runs whole models only, and passes nothing to others: its
    engine schedules by itself. While layers arrive it can work alone."""

    worker: WorkerRef
    device: Device
    holdings: tuple[HoldingReport, ...] = ()
    cores: int = 1
    own_cores: int = 1
    is_engine: bool = False


class AgentJoined(Event, frozen=True):
    """A host agent is ready to hold copies in its host's memory."""

    agent: WorkerRef
    host: Host
    holdings: tuple[HoldingReport, ...] = ()


class WorkerLost(Event, frozen=True):
    """The process of a worker or agent, or its connection, is gone: nothing more comes from it."""

    worker: WorkerRef
    reason: str


class MembersLeave(Event, frozen=True):
    """These members want to go: nothing new is to come to them, and what they have is needed
    elsewhere. Members that have gone are lost, as all others (WorkerLost)."""

    members: tuple[WorkerRef, ...]


class RequestArrived(Event, frozen=True):
    """A request was accepted by a gateway.

    After a controller restart the gateway announces its unfinished requests again, with the
    `attempt` that is under way and the worker that runs it (None: still waiting). Requests of one
    `client` stand in one queue; a turn of the client is worth `weight` of them. `moves` is how
    often the attempt was taken over, as far as the gateway knows (see BatchTaken).
    """

    request: RequestId
    model: str
    prompt_tokens: int
    output_tokens_max: int
    attempt: int = 0
    worker: WorkerRef | None = None
    client: str = ""
    weight: int = 1
    moves: int = 0


class RequestCancelled(Event, frozen=True):
    """The client went away. If the request is dispatched, its RequestEnded still follows."""

    request: RequestId


class GatewayLost(Event, frozen=True):
    """The gateway of this name is gone, or begins anew: all that it asked for is over, with no
    further word of it. What it still answers for it announces when it is back."""

    gateway: str


class RequestEnded(Event, frozen=True):
    """Terminal for Dispatch. `output_tokens` counts the tokens of this attempt.

    Workers name themselves: an attempt may have moved on to another one, which ends it (see
    BatchTaken; `moves` times, if no gateway could be told of that). An outcome of RETURNED means
    that it runs elsewhere with the next attempt.
    """

    request: RequestId
    attempt: int
    outcome: Outcome
    output_tokens: int = 0
    worker: WorkerRef | None = None
    moves: int = 0


class BatchTaken(Event, frozen=True):
    """An instance took a batch over from a loading one: from now on its `requests` are this
    worker's, which ends them (progress). Each is (request, attempt, how often that was taken over,
    with this time).

    Layers below `next_layer` were done; `row_bytes` of hidden rows came along, `pull_ns` after they
    were asked for. An attempt may go from worker to worker and back, and their messages come on
    different wires: the owner is the one with the most moves.
    """

    instance: InstanceId
    worker: WorkerRef
    target: InstanceId
    requests: tuple[tuple[RequestId, int, int], ...]
    next_layer: int
    tokens: int
    row_bytes: int
    pull_ns: int


class KvTaken(Event, frozen=True):
    """All KV that other workers had of requests which an instance took over is there: `kv_bytes`,
    of `layers` decoder layers. Each of `requests` is (request, attempt).

    That was `took_ns` after the KV was asked for, which can be before it was computed; `arrival_ns`
    lie between the first layer's arrival and the last one's.
    """

    instance: InstanceId
    worker: WorkerRef
    requests: tuple[tuple[RequestId, int], ...]
    layers: int
    kv_bytes: int
    took_ns: int
    arrival_ns: int


class TeamBroke(Event, frozen=True):
    """The team of this number is over, as the instance that leads it says: its requests wait again
    (progress). The workers `between` do not reach one another (None: it is not known where the
    team broke)."""

    instance: InstanceId
    team: int
    between: tuple[WorkerRef, WorkerRef] | None = None


class StageCounts(Value, frozen=True):
    """What came to an instance of a stage: sums over its life, which only grow.

    `came` visits (Runs of leaders) came, and `done` of them are over. Between arrivals were gaps,
    the Runs took `busy_ns` on the device, and before that visits waited for `waited_ns`, all
    summed up. Of the squares an integer of ns times s is the sum. Runs with prompts computed
    `prompt_tokens` in `prompt_ns`. `merged` of those that are over were carried out together with
    another one that counts: there were `done - merged` executions.
    """

    came: int = 0
    done: int = 0
    gaps_ns: int = 0
    gaps_squared_ns_s: int = 0
    busy_ns: int = 0
    busy_squared_ns_s: int = 0
    waited_ns: int = 0
    prompt_tokens: int = 0
    prompt_ns: int = 0
    merged: int = 0


class InstanceReported(Event, frozen=True):
    """Load of one instance, sent when it changed.

    `started` lists (request, attempt) pairs that emitted their first token here since the last
    report, `admitted` those that first had a place and KV; `queued_prefill_tokens` counts prompt
    tokens not yet computed on the instance, `begun_prompt_tokens` those that are computed of
    requests that have not started;
    `emitted_tokens` counts all tokens the instance ever emitted, `preemptions` how often a running
    request lost its KV blocks to others, `prefix_lookup_tokens` the tokens looked up in the prefix
    index, and `reused_tokens` those found there and not computed. `kv_blocks_used` are blocks of
    running requests: what is only kept in case it comes again counts as free. Of the free ones at
    most `kv_blocks_kept` are kept for running requests to grow. At an instance of a later stage,
    whose blocks leaders have, those of pipelines that are over are the used ones. `left_out`
    requests are on the instance and found no place or too little KV. `handovers` counts live
    batches that the instance took over, `handover_bytes` rows and KV that came with them. Its Runs
    with prompts have in all computed `prefill_tokens` in `prefill_ns`; tokens that passed a part of
    the layers count for that part. `stage` is there where it is an instance of a stage.
    """

    instance: InstanceId
    started: tuple[tuple[RequestId, int], ...]
    running: int
    queued_prefill_tokens: int
    kv_blocks_used: int
    kv_blocks: int
    emitted_tokens: int
    preemptions: int = 0
    prefix_lookup_tokens: int = 0
    reused_tokens: int = 0
    handovers: int = 0
    handover_bytes: int = 0
    left_out: int = 0
    kv_blocks_kept: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0
    admitted: tuple[tuple[RequestId, int], ...] = ()
    begun_prompt_tokens: int = 0
    stage: StageCounts | None = None


class LiveStarted(Event, frozen=True):
    """The instance that the holding is part of takes requests from now on, whatever of it is there
    (progress)."""

    holding: HoldingId


class RoleChanged(Event, frozen=True):
    """The instance that the holding is part of has this role from now on, which a ChangeDuty gave
    it (progress)."""

    holding: HoldingId
    role: Role


class FirstByteArrived(Event, frozen=True):
    """The first byte of parameters arrived at a worker (progress)."""

    holding: HoldingId


class LayerArrived(Event, frozen=True):
    """`layer` is complete and verified, as are all of the span below `watermark` (progress).

    `live_layers` are the layers of batches that a live instance has run by then.
    """

    holding: HoldingId
    layer: int
    watermark: int
    live_layers: int = 0


class HoldingCompleted(Event, frozen=True):
    """Terminal for StartHolding: every layer of its span is there and verified.

    An instance can serve when all its ranks have reported so. `received_bytes` came into the
    member's memory for it, from peers or storage, as who moved them counted. What came twice (a
    corrupt layer, a chunk whose sender was lost) counts twice; what the member had before (a warm
    spare's bytes, resident layers) does not count.
    """

    holding: HoldingId
    received_bytes: int


class HoldingFailed(Event, frozen=True):
    """Terminal for StartHolding: nothing of it is left in the member's memory."""

    holding: HoldingId
    reason: str


class HoldingDropped(Event, frozen=True):
    """Terminal for DropHolding: the memory is free again."""

    holding: HoldingId


class CoresChanged(Event, frozen=True):
    """Terminal for SetCores: from its next Run on the worker computes with so many cores. It was
    `asked` for so many (0: it says again what it has)."""

    worker: WorkerRef
    cores: int
    asked: int = 0


class FeedFailed(Event, frozen=True):
    """The holding gets no more from `upstream`, but keeps what is there (progress).

    `is_stalled`: the connection stands, but nothing has come for a while, and may come yet.
    """

    holding: HoldingId
    upstream: WorkerRef
    reason: str
    is_stalled: bool = False


class LinkMeasured(Event, frozen=True):
    """A probe between two members took this long: what their links carry, together, at least."""

    sender: WorkerRef
    receiver: WorkerRef
    bytes_per_s: int


class ModelAdded(Event, frozen=True):
    """A model was published while the pool runs. Ends in ScaleDecided as any other."""

    policy: ModelPolicy


class ModelChanged(Event, frozen=True):
    """A model has other limits from now on: its `policy` replaces the last one (same sizes)."""

    policy: ModelPolicy


class ModelRemoved(Event, frozen=True):
    """A model was withdrawn: no new requests; running ones finish. Ends in ModelGone."""

    model: str


class CapacityMeasured(Event, frozen=True):
    """Warm-up measurement of one (device kind, model): rates enter decisions only as events."""

    kind: str
    model: str
    prefill_tokens_per_s: int
    kv_blocks: int


class Tick(Event, frozen=True):
    """The time asked for with WakeAt has come."""


AnyEvent = (
    WorkerJoined
    | AgentJoined
    | WorkerLost
    | MembersLeave
    | RequestArrived
    | RequestCancelled
    | GatewayLost
    | RequestEnded
    | InstanceReported
    | BatchTaken
    | KvTaken
    | TeamBroke
    | LiveStarted
    | RoleChanged
    | FirstByteArrived
    | LayerArrived
    | HoldingCompleted
    | HoldingFailed
    | HoldingDropped
    | CoresChanged
    | FeedFailed
    | LinkMeasured
    | ModelAdded
    | ModelChanged
    | ModelRemoved
    | CapacityMeasured
    | Tick
)
