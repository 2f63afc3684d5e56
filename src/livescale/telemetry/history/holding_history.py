"""Histories of single things: one rank's bytes on one member, and one instance."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, HoldingReport, KvTaken, StageCounts
from livescale.values.chunks import Feed
from livescale.values.routes import Duty
from livescale.values.types import HoldingId, InstanceId, InstanceState, Role, WorkerRef

Kind = TypeVar("Kind")

Stretch = tuple[InstanceState, int, int]
"""A state, and from when to when (ns)."""
RoleStretch = tuple[Role, int, int]
"""A role, and from when to when (ns)."""


class Ending(enum.StrEnum):
    """How a holding ended: given up on order, its load failed, or its member was lost. Copies and
    warm spares may also go with a member that leaves, and warm spares may be used again."""

    RELEASED = "released"
    REUSED = "reused"
    FAILED = "failed"
    LOST = "lost"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class LayerArrival:
    """A layer has arrived: how many of the first layers, and how many bytes, are there now, and
    how many layers of live batches the instance has run."""

    at_ns: int
    watermark: int
    live_layers: int
    arrived_bytes: int


@dataclass(slots=True, eq=False)
class HoldingHistory:
    """One rank of a model in the memory of one member, from its order until nothing is left.

    `instance` is the one that computes with it (None: a copy in host memory, or a warm spare, which
    begins when an instance releases its holding). `is_ordered` is
    False if the `order` is on record only in a member's report. `known_ns` are times at which the
    controller began (even places) and ceased to know of it: one that starts anew knows of nothing
    before the members have joined.
    """

    order: StartHolding
    instance: InstanceHistory | None = field(repr=False)
    begun_ns: int
    is_ordered: bool
    layer_bytes: tuple[int, ...]
    is_spare: bool = False
    known_ns: list[int] = field(default_factory=list)
    arrivals: list[LayerArrival] = field(default_factory=list)
    #: a bit per layer that has arrived, the bytes of these, and how many of the first are there
    presence: int = 0
    arrived_bytes: int = 0
    watermark: int = 0
    live_ns: int | None = None
    first_byte_ns: int | None = None
    whole_ns: int | None = None
    received_bytes: int | None = None
    ended_ns: int | None = None
    ending: Ending | None = None
    reason: str = ""

    @property
    def id(self) -> HoldingId:
        return self.order.holding

    @property
    def member(self) -> WorkerRef:
        return self.order.holding.member

    @property
    def model(self) -> str:
        return self.order.model

    @property
    def rank(self) -> int:
        return self.order.rank

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def senders(self) -> list[str]:
        return sender_names(self.order.feeds)

    @property
    def first_layer_ns(self) -> int | None:
        return self.arrivals[0].at_ns if self.arrivals else self.whole_ns

    @property
    def filled(self) -> list[tuple[int, float]]:
        """How much of the rank's bytes, as a share, was there from which time on."""
        shares = [(self.begun_ns, 0.0)] if self.is_ordered else []
        size = self.size_bytes
        shares += [(at.at_ns, at.arrived_bytes / size) for at in self.arrivals if size]
        return shares if self.whole_ns is None else [*shares, (self.whole_ns, 1.0)]

    def known_spans(self, until_ns: int) -> list[tuple[int, int]]:
        """From when to when the controller knew of it; a span that lasts is cut at `until_ns`."""
        times = [*self.known_ns, until_ns]
        return list(zip(times[::2], times[1::2], strict=False))

    def know(self, now_ns: int, *, is_known: bool) -> None:
        """From now on the controller knows of it, or not any more."""
        if (len(self.known_ns) % 2 == 1) != is_known:
            self.known_ns.append(now_ns)

    def arrive(self, now_ns: int, layer: int, watermark: int, live_layers: int) -> None:
        """A layer, and all below `watermark`, are there."""
        new = (1 << layer | (1 << watermark) - 1) & ~self.presence
        self.presence |= new
        while new and self.layer_bytes:
            self.arrived_bytes += self.layer_bytes[new.bit_length() - 1]
            new ^= 1 << new.bit_length() - 1
        self.watermark = max(self.watermark, watermark)
        self.arrivals.append(LayerArrival(now_ns, watermark, live_layers, self.arrived_bytes))

    def end(self, now_ns: int, ending: Ending, reason: str) -> None:
        """Nothing is left. One rank that fails or is lost ends its instance; else the last does."""
        self.ended_ns, self.ending, self.reason = now_ns, ending, reason
        self.know(now_ns, is_known=False)
        instance = self.instance
        if instance is not None and instance.ended_ns is None:
            is_last = all(held.ended_ns is not None for held in instance.holdings)
            if is_last or ending is not Ending.RELEASED:
                told = f": {reason}" if ending is Ending.FAILED else ""
                instance.ended_ns, instance.ending = now_ns, f"{ending}{told}"

    def as_report(self) -> HoldingReport:
        """What the member would report, but not from whom it gets the rest. Only an instance that
        takes requests while it loads has a live order."""
        instance = self.instance
        duty = self.order.duty if instance is None else instance.told
        if duty is not None and instance is not None and instance.state is not InstanceState.LIVE:
            duty = msgspec.structs.replace(duty, live_order=None, gives_to=())
        order = msgspec.structs.replace(self.order, feeds=(), duty=duty)
        is_whole, layers = self.whole_ns is not None, range(self.watermark, order.span.stop)
        beyond = () if is_whole else tuple(n for n in layers if self.presence >> n & 1)
        return HoldingReport(order, self.watermark, is_whole, self.is_spare, beyond)


@dataclass(slots=True, eq=False)
class InstanceHistory:
    """One instance from the order to load it until nothing of it is left.

    `changes` are the states that it went through, LOADING (which begins with the order), LIVE,
    SERVING and DRAINING, with the time of each; `roles` likewise those that it was told to have.
    `role_changes` has each that it took on later, with the time from the order to that. `duty` is
    the one of the order, `told` what it was told last. `taken` are the batches that others took
    over while it loaded, `pulled` those that it took over from prefill instances, with their times;
    `kv` is what came to it from others of requests that it took over. `visits` are, of an instance
    of a stage, its sums as it reported them, with their times.
    `holdings` are its ranks', never empty. `ending` says how it ended; empty while it is there.
    """

    duty: Duty
    model: str
    changes: list[tuple[int, InstanceState]]
    holdings: list[HoldingHistory] = field(default_factory=list)
    emitted_tokens: int = 0
    first_token_ns: int | None = None
    first_help_ns: int | None = None
    taken: list[tuple[int, BatchTaken]] = field(default_factory=list)
    pulled: list[tuple[int, BatchTaken]] = field(default_factory=list)
    kv: list[KvTaken] = field(default_factory=list)
    visits: list[tuple[int, StageCounts]] = field(default_factory=list)
    roles: list[tuple[int, Role]] = field(init=False)
    role_changes: list[tuple[Role, int]] = field(default_factory=list)
    told: Duty = field(init=False)
    ended_ns: int | None = None
    ending: str = ""

    def __post_init__(self) -> None:
        self.told = self.duty
        self.roles = [(self.changes[0][0], self.duty.role)]

    @property
    def number(self) -> InstanceId:
        return self.duty.instance

    @property
    def state(self) -> InstanceState:
        """Its last state, which an instance that has ended keeps."""
        return self.changes[-1][1]

    @property
    def role(self) -> Role:
        """Its last one."""
        return self.roles[-1][1]

    @property
    def is_ordered(self) -> bool:
        """The order to load it is on record."""
        return self.holdings[0].is_ordered

    @property
    def is_woken(self) -> bool:
        """It was made of a warm spare: nothing had to be loaded."""
        return self.holdings[0].order.spare is not None

    @property
    def is_whole(self) -> bool:
        """All ranks have had everything."""
        return all(holding.whole_ns is not None for holding in self.holdings)

    @property
    def live_ns(self) -> int | None:
        """When it began to take requests before everything was there."""
        return next((at for at, state in self.changes if state is InstanceState.LIVE), None)

    @property
    def served_ns(self) -> int | None:
        """When it began to serve."""
        return next((at for at, state in self.changes if state is InstanceState.SERVING), None)

    @property
    def loading_ns(self) -> int | None:
        """From the order until it served; None if it never did, or the order is not on record."""
        if self.served_ns is None or not self.is_ordered:
            return None
        return self.served_ns - self.changes[0][0]

    @property
    def received_bytes(self) -> int | None:
        """Of all ranks; None as long as one has not reported."""
        amounts = [h.received_bytes for h in self.holdings if h.received_bytes is not None]
        return sum(amounts) if len(amounts) == len(self.holdings) else None

    @property
    def arrivals(self) -> list[LayerArrival]:
        """Rank 0's."""
        return [arrival for h in self.holdings if h.rank == 0 for arrival in h.arrivals]

    def stretches(self, until_ns: int) -> list[Stretch]:
        """Its states in order; one that lasts is cut at `until_ns`."""
        return _stretches(self.changes, until_ns if self.ended_ns is None else self.ended_ns)

    def role_stretches(self, until_ns: int) -> list[RoleStretch]:
        """Its roles in order; one that lasts is cut at `until_ns`."""
        return _stretches(self.roles, until_ns if self.ended_ns is None else self.ended_ns)

    def serving_ns(self, until_ns: int) -> int:
        """How long it served; draining does not count."""
        return sum(
            stop_ns - start_ns
            for state, start_ns, stop_ns in self.stretches(until_ns)
            if state is InstanceState.SERVING
        )

    def enter(self, now_ns: int, state: InstanceState) -> None:
        """It is in this state from now on, unless it is gone or was so already."""
        if self.ended_ns is None and self.state is not state:
            self.changes.append((now_ns, state))

    def hand_over(self, now_ns: int, event: BatchTaken, taker: InstanceHistory | None) -> None:
        """Another instance (None: not known) has taken a batch over from this one."""
        if self.first_help_ns is None:
            self.first_help_ns = now_ns
        layers = len(self.holdings[0].layer_bytes)
        # Requests that were moved when everything was there are no help of a loading one.
        if not layers or event.next_layer < layers:
            self.taken.append((now_ns, event))
        elif taker is not None and (self.role, taker.role) == (Role.PREFILL, Role.DECODE):
            taker.pulled.append((now_ns, event))

    def tell(self, now_ns: int, duty: Duty) -> None:
        """Its duty is another one from now on."""
        self.told = duty
        if self.ended_ns is None and self.role is not duty.role:
            self.roles.append((now_ns, duty.role))

    def has_role(self, now_ns: int, role: Role) -> None:
        """It says that it has this role now. One of an earlier order may be late."""
        told_ns, told = self.roles[-1]
        if told is role and len(self.role_changes) < len(self.roles) - 1:
            self.role_changes.append((role, now_ns - told_ns))

    def go_live(self, now_ns: int) -> None:
        """It takes requests from now on, whatever of it is there."""
        if self.state is InstanceState.LOADING:
            self.enter(now_ns, InstanceState.LIVE)


def _stretches(changes: Sequence[tuple[int, Kind]], end_ns: int) -> list[tuple[Kind, int, int]]:
    """What held from when to when, without what held for no time."""
    stops = [at for at, _ in changes[1:]] + [end_ns]
    return [
        (kind, start_ns, stop_ns)
        for (start_ns, kind), stop_ns in zip(changes, stops, strict=True)
        if stop_ns > start_ns
    ]


def sender_names(feeds: Sequence[Feed]) -> list[str]:
    """Who sends, each once."""
    return list(dict.fromkeys(str(feed.upstream) for feed in feeds))
