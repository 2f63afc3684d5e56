"""What the router deals with: a request's record, what a worker has of requests, and routes as they
are chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from livescale.messages.events import InstanceReported
from livescale.messages.scale_plan import pair_until
from livescale.values.bindings import Binding, EarlyBinding
from livescale.values.routes import Route
from livescale.values.types import InstanceId, Part, RequestId, WorkerRef


@dataclass(slots=True)
class RequestRecord:
    """A request that has not ended. `worker` is set while an attempt is under way. It came to the
    part `entry` of its model, and is the work of `part` now."""

    id: RequestId
    part: Part
    entry: Part
    prompt_tokens: int
    #: order of arrival: a retried request goes back to its place
    order: int
    #: who sent it, and how many requests a turn of that client is worth
    client: str = ""
    weight: int = 1
    #: from when on it waits too long for the promised time to its first token
    late_ns: int | None = None
    attempt: int = 0
    #: how often the current attempt was taken over
    moves: int = 0
    worker: WorkerRef | None = None
    #: a worker that was lost before its report came that it had taken the attempt over
    lost_taker: WorkerRef | None = None
    #: the instance gave it a place and KV, and emitted its first token
    is_admitted: bool = False
    is_started: bool = False
    is_cancelled: bool = False
    #: attempts that came to nothing (one that was given back is none of them), and while it waits
    #: how the last one did
    failures: int = 0
    failure: str = ""
    #: until its first token it is given no company: it may be what its workers ended by
    is_alone: bool = False
    #: workers that the gateway could not reach, or that gave the request back, and until when they
    #: are left alone
    avoided: tuple[WorkerRef, ...] = ()
    avoided_until_ns: int = 0
    #: who gave the last attempt back, and when; and when the worker was lost that this counted for
    returned_by: WorkerRef | None = None
    returned_ns: int = 0
    partner_lost_ns: int | None = None


@dataclass(slots=True)
class Outstanding:
    """What a worker has: `records` were dispatched to it and have not ended. So many of them are
    not admitted and not started; tokens are those of prompts. Then what it reported last. `newest`
    is higher the later it was given a request."""

    records: dict[RequestId, RequestRecord] = field(default_factory=dict)
    clients: dict[str, int] = field(default_factory=dict)
    unadmitted: int = 0
    unstarted: int = 0
    unstarted_tokens: int = 0
    #: of those that are not started, how many are to be alone
    alone: int = 0
    tokens: int = 0
    queued_tokens: int = 0
    begun_tokens: int = 0
    left_out: int = 0
    newest: int = 0

    def add(self, record: RequestRecord) -> None:
        self.records[record.id] = record
        self.clients[record.client] = self.clients.get(record.client, 0) + 1
        self._count(record, 1)

    def remove(self, record: RequestRecord) -> None:
        del self.records[record.id]
        self.clients[record.client] -= 1
        if not self.clients[record.client]:
            del self.clients[record.client]
        self._count(record, -1)
        if not record.is_started:
            # Some of what was begun may be of this one: the next report says how much is left.
            self.begun_tokens = 0

    def admit(self, record: RequestRecord) -> None:
        """One of them has a place and KV."""
        self._count(record, -1)
        record.is_admitted = True
        self._count(record, 1)

    def start(self, record: RequestRecord) -> None:
        """One of them has its first token."""
        self._count(record, -1)
        record.is_admitted = record.is_started = True
        self._count(record, 1)

    def reported(self, report: InstanceReported) -> None:
        self.queued_tokens = report.queued_prefill_tokens
        self.begun_tokens = report.begun_prompt_tokens
        self.left_out = report.left_out

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens that it has yet to compute. What it reports counts where that is more: of
        preempted requests, or of an earlier life of the controller."""
        return max(self.unstarted_tokens - self.begun_tokens, self.queued_tokens)

    def _count(self, record: RequestRecord, sign: int) -> None:
        self.tokens += sign * record.prompt_tokens
        self.unadmitted += 0 if record.is_admitted else sign
        if not record.is_started:
            self.unstarted += sign
            self.unstarted_tokens += sign * record.prompt_tokens
            self.alone += sign if record.is_alone else 0

    def validate(self, worker: WorkerRef) -> None:
        """The counts are those of the records. Raises AssertionError."""
        counted = Outstanding()
        for request, record in self.records.items():
            assert record.worker == worker, request
            counted.add(record)
        counted.queued_tokens, counted.begun_tokens = self.queued_tokens, self.begun_tokens
        counted.left_out, counted.newest = self.left_out, self.newest
        assert counted == self, worker


_PAIR_GAIN_PART = 2
"""During a load a pair computes what one instance does, and so many-th of that: the target has half
of the layers on average, and what it runs ahead is used."""


class RouteRow:
    """A route: `tokens` of prompts are to be done on its `workers`, `room` more requests can go
    there, and prompts up to `tokens_max` together (None: any). `amount` is what it is chosen by
    among its like (thousandths of a token), then `held_tokens`, then `newest`: how far a Run is
    that goes on there is not known, but what was given a request longer ago is done sooner. It has
    `held` requests."""

    def __init__(
        self,
        route: Route,
        tokens: int,
        held: tuple[int, int],
        *,
        room: int,
        tokens_max: int | None = None,
        newest: int = 0,
    ) -> None:
        """`held` is how many requests it has, and their tokens."""
        self.route = route
        self.workers = route.workers
        self.tokens = tokens
        self.held, self.held_tokens = held
        self.room = room
        self.tokens_max = tokens_max
        self.newest = newest
        self.cost_permille, self.lag_tokens = route.cost_permille, route.lag_tokens
        self.amount = self._computed_at() + self.lag_tokens * 1000

    @property
    def instance(self) -> InstanceId:
        return self.route.first.instance

    @property
    def worker(self) -> WorkerRef:
        return self.workers[0]

    def take_ahead(self) -> None:
        """There is no other route to keep prompts for. A target that had no more of them than one
        instance computes during the load would be idle: it runs ahead on all that it has."""
        pair = self.route.pair
        if pair is not None and self.tokens_max is not None:
            self.tokens_max += pair.lag_tokens // _PAIR_GAIN_PART

    def add(self, tokens: int) -> None:
        self.held += 1
        self.tokens += tokens
        self.held_tokens += tokens
        self.amount = self._computed_at() + self.lag_tokens * 1000

    def _computed_at(self) -> int:
        """When all of it is computed, layers that are missing left out."""
        pair = self.route.pair
        if pair is None:
            return self.tokens * self.cost_permille
        at = pair_until(self.tokens, pair.lag_tokens, pair.loaded, pair.layers)
        return at * self.cost_permille // 1000

    @property
    def is_open(self) -> bool:
        """Some request could go there."""
        return self.fits(1)

    def fits(self, tokens: int) -> bool:
        """A prompt of so many tokens can go there. One always can that would be alone."""
        if self.room <= 0:
            return False
        return self.tokens_max is None or not self.tokens or self.tokens + tokens <= self.tokens_max

    @property
    def until(self) -> int:
        """When it is done with all of it, as an amount: what runs while layers arrive is done soon
        after the last of them."""
        return max(self._computed_at(), self.lag_tokens * 1000)


_BESIDE_PLACES_MAX = 8
"""Requests that an instance may hold beside those that it has places for, when binding is late."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What instances may hold. One computes `places` requests at once, and holds at most
    `ahead_max` that it has not started; a loading one `live_ahead_max` that it has not admitted."""

    binding: Binding
    ahead_max: int
    live_ahead_max: int
    places: int

    def row(self, route: Route, known: Mapping[WorkerRef, Outstanding]) -> RouteRow:
        """What is outstanding is that of all workers of the route."""
        workers = route.workers
        count = tokens = uncomputed = unadmitted = unstarted = left_out = newest = alone = 0
        for worker in workers:  # not sum by sum: this is asked of every route at every step
            outstanding = known.get(worker)
            if outstanding is not None:
                count += len(outstanding.records)
                tokens += outstanding.tokens
                uncomputed += outstanding.uncomputed_tokens
                unadmitted += outstanding.unadmitted
                unstarted += outstanding.unstarted
                left_out += outstanding.left_out
                newest = max(newest, outstanding.newest)
                alone += outstanding.alone
        binding, held = self.binding, (count, tokens)
        if alone:
            return RouteRow(route, uncomputed, held, room=0, newest=newest)
        if isinstance(binding, EarlyBinding):
            ahead_max = self.live_ahead_max if route.is_live else binding.ahead_max
            return RouteRow(route, tokens, held, room=ahead_max - unadmitted)
        tokens_max = binding.ahead_tokens_max * max(len(workers), route.members)
        if route.is_live:
            ahead, room = route.ahead_tokens, self.live_ahead_max - unadmitted
            live_max = None if ahead is None else tokens_max + ahead
            return RouteRow(route, uncomputed, held, room=room, tokens_max=live_max, newest=newest)
        room = min(self.ahead_max - unstarted, self.places + _BESIDE_PLACES_MAX - count)
        room = 0 if left_out else room
        return RouteRow(route, uncomputed, held, room=room, tokens_max=tokens_max, newest=newest)


def bound_rows(rows: list[RouteRow], waiting_tokens: int, waking: int) -> None:
    """A single row takes ahead. While `waking` instances will serve in a moment each row gets no
    more than its part of all prompt tokens, or one request: the rest is for these."""
    if len(rows) == 1:
        rows[0].take_ahead()
    if not waking:
        return
    tokens = waiting_tokens + sum(row.tokens for row in rows)
    share = -(-tokens // (len(rows) + waking))
    for row in rows:
        if row.tokens_max is not None:
            row.tokens_max = min(row.tokens_max, share)


def choose_row(
    rows: list[RouteRow], tokens: int, shunned: tuple[WorkerRef, ...]
) -> RouteRow | None:
    """The row for the next request, of none of these workers; it may have no room: the request
    waits for it then."""
    if shunned:
        rows = [row for row in rows if row.worker not in shunned]
    ready = [row for row in rows if not row.lag_tokens]
    row = _least(row for row in ready if row.fits(tokens)) or _least(ready)
    later = _least(row for row in rows if row.lag_tokens and row.fits(tokens))
    if later is not None and (row is None or later.until < row.until):
        row = later
    return row


def empty_rows(rows: list[RouteRow], shunned: tuple[WorkerRef, ...]) -> list[RouteRow]:
    """Those for a request that is to be alone, and keeps away from some workers. If there are none,
    the one that has fewest gets no others until it is empty."""
    rows = [row for row in rows if row.worker not in shunned]
    empty = [row for row in rows if not row.held]
    if not empty and rows:
        min(rows, key=lambda row: (row.held, row.instance)).room = 0
    return empty


def _least(rows: Iterable[RouteRow]) -> RouteRow | None:
    """The row with the least amount; of equals the one that was given a request longest ago, then
    the lowest instance."""
    return min(rows, key=_place_in_line, default=None)


def _place_in_line(row: RouteRow) -> tuple[int, int, int, InstanceId]:
    return row.amount, row.held_tokens, row.newest, row.instance
