"""What instances tell each other whose Runs go through several of them. Rows travel beside it.

A request has one owner; its Runs *visit* other instances (DESIGN §8). The owner *leads*: its
Batcher decides each Run, every member of the way runs its layers over its own KV blocks and passes
the rows on, and the last one samples (λScale §4.3, execution pipelines).

| message | from | means |
| --- | --- | --- |
| Quota | member | so many of my KV blocks are yours |
| Visit | the one before on the way | run these segments over your layers; their rows come along |
| Visited | the last on the way | the tokens of a Run |
| Broken | member | I cannot pass on what you lead |
| Kept | leader | the team ends: of the quota I need these blocks only |
| Disbanded | leader | nothing more comes: the quota is yours again |
| Known | leader of stages | I have been told that you are a member |

The leader numbers the blocks of a quota 0, 1, 2, …: a block table of its Batcher is good at every
member, each of which knows the block of its own that a number stands for. So what the leader frees,
shares or finds again is free, shared and found at all of them, and nothing is told of it.
"""

from __future__ import annotations

from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import BatchKey, Segment
from livescale.values.routes import Partner
from livescale.values.types import InstanceId, LayerSpan, Value, WorkerRef


class Lead(Value, frozen=True, order=True):
    """A leader, and which of its teams it is: a later one has a higher number."""

    leader: InstanceId
    number: int


class Stop(Value, frozen=True):
    """An instance on the way of a Run, and the layers that it runs."""

    partner: Partner
    span: LayerSpan


class Quota(Value, frozen=True, tag=True):
    """The member keeps so many KV blocks for what the leader decides, until that is Disbanded.
    `stay` is that of the last Known (0: none came yet)."""

    lead: Lead
    member: InstanceId
    blocks: int
    stay: int = 0


class Visit(Value, frozen=True, tag=True):
    """The leader's Run `run`, from the first instance of `way` on. `home` is where the leader is.

    Rows come along where the first span does not begin with layer 0: one per position, in segment
    order. Behind layer 0 only the number of a segment's token ids counts. Of requests that are
    `faulty` an instance before could not compute rows: theirs say nothing.

    `flying` are the leader's Runs that were on their way when this one began, itself included.
    Each earlier one is over, or void: its leader has forgotten it with a member, which may compute
    it still. The leader gives the blocks of a void Run to later ones, and each of these says so
    wherever it comes: no message has to reach a member before another one's.
    """

    lead: Lead
    home: Partner
    run: int
    way: tuple[Stop, ...]
    segments: tuple[Segment, ...]
    flying: tuple[int, ...]
    faulty: tuple[FaultyRequest, ...] = ()

    @property
    def key(self) -> BatchKey:
        """Names the rows."""
        return BatchKey(self.lead.leader, self.run)

    @property
    def positions(self) -> int:
        return sum(segment.token_count for segment in self.segments)

    @property
    def rows(self) -> int:
        """Rows that come along."""
        return self.positions if self.way[0].span.start else 0


class Visited(Value, frozen=True, tag=True):
    """One token per sampling segment of the Run, in segment order: none that means anything for
    `faulty` requests, which could not be computed."""

    lead: Lead
    run: int
    token_ids: tuple[int, ...]
    faulty: tuple[FaultyRequest, ...] = ()

    @property
    def key(self) -> BatchKey:
        """Names the Run."""
        return BatchKey(self.lead.leader, self.run)


class Kept(Value, frozen=True, tag=True):
    """The leader runs nothing more, and of the quota needs these blocks only: KV in them is
    fetched, or belongs to requests that are given."""

    lead: Lead
    blocks: tuple[int, ...]


class Broken(Value, frozen=True, tag=True):
    """The member's part of the way is over: nothing that visits comes through, because the member
    does not reach the worker `lost` (None: because the member goes). `stay` is that of the blocks
    that it keeps (0: the first one's)."""

    lead: Lead
    member: InstanceId
    lost: WorkerRef | None = None
    stay: int = 0


class Disbanded(Value, frozen=True, tag=True):
    """The leader sends nothing more."""

    lead: Lead


class Known(Value, frozen=True, tag=True):
    """The leader of a pipeline has been told that the receiver is a member, for the `stay`-th time
    (from 1 on). A member that was told sooner may have been answered Disbanded: that is void, and
    the member keeps blocks again. What was kept for an earlier stay is not kept any more."""

    lead: Lead
    stay: int


class Shared(Value, frozen=True):
    """KV of a request in a leader's blocks: its block table there, the same at every member. Of the
    layers of `span` it is where the request goes."""

    lead: Lead
    blocks: tuple[int, ...]
    span: LayerSpan


VisitMessage = Quota | Visit | Visited | Kept | Broken | Disbanded | Known
