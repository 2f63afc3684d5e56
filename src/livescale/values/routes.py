"""Routes: the hops that a request may take over instances, and the KV that moves between them.

A request has one owner. Work leaves an owner by being given: ownership moves, rows and KV follow.
A Route says what may happen; who takes a batch is decided by the first pull (DESIGN §8).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from livescale.values.types import InstanceId, LayerSpan, Role, Value, WorkerRef

OVERLAP = "overlap"
"""The live order of an instance that works alone while its layers arrive."""


class Partner(Value, frozen=True, order=True):
    """An instance, and the worker of its rank 0, which gets messages for the instance."""

    instance: InstanceId
    worker: WorkerRef


class Does(enum.StrEnum):
    """What a hop does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Hop(Value, frozen=True):
    """One of `partners` takes the request here and runs the layers of `span` (None: the pull of the
    next hop makes the cut)."""

    partners: tuple[Partner, ...]
    span: LayerSpan | None
    does: Does = Does.BOTH


class PairProgress(Value, frozen=True):
    """Of a live pair: `loaded` of `layers` decoder layers are there, and one instance computes
    `lag_tokens` until the others are."""

    loaded: int
    layers: int
    lag_tokens: int


class Route(Value, frozen=True):
    """Hops in order. Requests are sent to the first one.

    A prompt token costs the instances of the route, together, `cost_permille` of what it costs one
    that has everything; `pair` says how that changes while layers arrive. Where one is alone and
    layers are missing nothing is finished before they are there: by then one instance computes
    `lag_tokens`. In a pipeline `members` work at once.
    """

    hops: tuple[Hop, ...]
    cost_permille: int = 1000
    lag_tokens: int = 0
    pair: PairProgress | None = None
    ahead_tokens: int | None = None
    members: int = 1

    @property
    def first(self) -> Partner:
        """Who gets the requests."""
        return self.hops[0].partners[0]

    @property
    def is_live(self) -> bool:
        """The first hop works with the layers that have arrived."""
        return self.hops[0].span is None

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        """All that may compute prompts of this route, in order."""
        if len(self.hops) == 1:  # as most are: the router asks for every route in every decision
            return tuple([partner.worker for partner in self.hops[0].partners])
        hops = [hop for hop in self.hops if hop.does is not Does.DECODE]
        return tuple(partner.worker for hop in hops for partner in hop.partners)


class Taker(Value, frozen=True):
    """An instance that running requests may move to. On the way there the KV of a token should take
    `kv_token_ps` (0: not known)."""

    partner: Partner
    kv_token_ps: int = 0


class TeamMember(Value, frozen=True):
    """An instance of a team, and the layers that it runs for it."""

    partner: Partner
    span: LayerSpan


class Team(Value, frozen=True):
    """Instances that serve together while none of them has all layers (λScale §4.3). The first one
    leads: requests are its own. Spans follow one another, from layer 0 to the last. Of the teams
    that one instance leads a later one has a higher `number`. KV of a token, of all layers, takes
    `kv_token_ps` on the slowest way between two members; an instance computes
    `prefill_tokens_per_s` in Runs full of prompt tokens (0: not known)."""

    number: int
    members: tuple[TeamMember, ...]
    kv_token_ps: int = 0
    prefill_tokens_per_s: int = 0

    @property
    def leader(self) -> Partner:
        return self.members[0].partner

    def __post_init__(self) -> None:
        check_way(self.members)
        if len(self.members) < 2:
            raise ValueError("spans of one member do not follow one another: a team has two")


def check_way(members: Sequence[TeamMember]) -> None:
    """Runs can go through these, from layer 0 on. Raises ValueError."""
    stops = [0, *(member.span.stop for member in members)]
    starts = [member.span.start for member in members]
    if starts != stops[:-1] or not members:
        spans = ", ".join(str(member.span) for member in members)
        raise ValueError(f"the spans of members do not follow one another: {spans or 'none'}")
    if len({member.partner.instance for member in members}) < len(members):
        raise ValueError("an instance is on the way twice")


class Pipeline(Value, frozen=True):
    """What an instance of a model's first stage leads: of each stage, in order, the instances that
    its requests may go through (QUART §4); of the first one only itself. A member keeps one in
    `shares` of its KV blocks for it."""

    number: int
    stages: tuple[tuple[TeamMember, ...], ...]
    shares: int = 1

    @property
    def leader(self) -> Partner:
        return self.stages[0][0].partner

    @property
    def members(self) -> tuple[TeamMember, ...]:
        return tuple(member for stage in self.stages for member in stage)

    def __post_init__(self) -> None:
        if not all(self.stages) or len(self.stages[0]) != 1:
            raise ValueError("a stage of a pipeline has no instance, or there are several leaders")
        check_way([stage[0] for stage in self.stages])
        if any({member.span for member in stage} != {stage[0].span} for stage in self.stages):
            raise ValueError("instances of one stage have different layers")
        if len({member.partner.instance for member in self.members}) < len(self.members):
            raise ValueError("an instance is in a pipeline twice")


class Duty(Value, frozen=True):
    """What a worker is told of routes: it is one rank of an instance, whose `workers` stand in the
    order of their ranks. The `role` names the part that the instance belongs to.

    With a `live_order` the instance takes requests while its layers arrive (live scaling), and
    `gives_to` may pull them from there (BlitzScale §5.2); without these it finishes them alone.
    With `drains_to` it is to become empty: its requests move to these. With `decodes_at` requests
    decode at one of these from their first token on (BlitzScale §2.1); without, they decode here.
    With a `team` the instance is one of its members. An instance of a stage is in these
    `pipelines`.
    """

    instance: InstanceId
    workers: tuple[WorkerRef, ...]
    role: Role = Role.UNIFIED
    live_order: str | None = None
    gives_to: tuple[Partner, ...] = ()
    drains_to: tuple[Taker, ...] = ()
    decodes_at: tuple[Partner, ...] = ()
    team: Team | None = None
    pipelines: tuple[Pipeline, ...] = ()


def reached(duty: Duty) -> dict[WorkerRef, None]:
    """Workers that an instance with this duty sends something to."""
    partners = [*duty.gives_to, *duty.decodes_at, *(taker.partner for taker in duty.drains_to)]
    ways = [pipeline.members for pipeline in duty.pipelines]
    if duty.team is not None:
        ways.append(duty.team.members)
    partners += [member.partner for members in ways for member in members]
    return {p.worker: None for p in partners if p.instance != duty.instance}


class KvMove(Value, frozen=True):
    """The KV of these layers goes from one instance to another."""

    sender: InstanceId
    receiver: InstanceId
    span: LayerSpan


Stage = tuple[InstanceId, LayerSpan]
"""Layers of a request on one instance."""


def kv_moves(done: Sequence[Stage], decode: Sequence[Stage]) -> list[KvMove]:
    """The one rule: KV of a layer must be where decode runs that layer; what prefill wrote
    elsewhere moves, nothing else does (DESIGN §8).

    `done` are the layers that prefill has run, and where; `decode` those that decode will run.
    Layers without KV, the embedding and the head, move nothing: callers leave them out.
    """
    moves = []
    for sender, written in done:
        for receiver, run in decode:
            start, stop = max(written.start, run.start), min(written.stop, run.stop)
            if sender != receiver and start < stop:
                moves.append(KvMove(sender, receiver, LayerSpan(start, stop)))
    return moves
