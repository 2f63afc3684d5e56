"""Routes: the hops that a request may take over instances, and the KV that moves between them.

A request has one owner. Work leaves an owner by being given: ownership moves, rows and KV follow.
A Route says what may happen; who takes a batch is decided by the first pull (DESIGN §8).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from livescale.types import InstanceId, LayerSpan, Role, Value, WorkerRef


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
    `lag_tokens`.
    """

    hops: tuple[Hop, ...]
    cost_permille: int = 1000
    lag_tokens: int = 0
    pair: PairProgress | None = None
    ahead_tokens: int | None = None

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
        """All that may hold a request of this route, in order."""
        if len(self.hops) == 1:  # as most are: the router asks for every route in every decision
            return tuple([partner.worker for partner in self.hops[0].partners])
        return tuple(partner.worker for hop in self.hops for partner in hop.partners)


class Taker(Value, frozen=True):
    """An instance that running requests may move to. On the way there the KV of a token should take
    `kv_token_ps` (0: not known)."""

    partner: Partner
    kv_token_ps: int = 0


class Duty(Value, frozen=True):
    """What a worker is told of routes: it is one rank of an instance, whose `workers` stand in the
    order of their ranks.

    With a `live_order` the instance takes requests while its layers arrive (live scaling), and
    `gives_to` may pull them from there (BlitzScale §5.2); without these it finishes them alone.
    With `drains_to` it is to become empty: its requests move to these.
    """

    instance: InstanceId
    workers: tuple[WorkerRef, ...]
    role: Role = Role.UNIFIED
    live_order: str | None = None
    gives_to: tuple[Partner, ...] = ()
    drains_to: tuple[Taker, ...] = ()


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
