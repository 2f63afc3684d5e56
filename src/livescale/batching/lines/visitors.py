"""A member's side of visits: Runs of other leaders over the layers that are here.

Runs are carried out in the order in which they came, on KV blocks that were set apart for their
leader. No Runs are chosen here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from livescale.batching.contract.live_messages import (
    KvWanted,
    LiveMessage,
    PartOf,
    UnexpectedMessage,
)
from livescale.batching.contract.serving import KvPlaces
from livescale.batching.contract.visit_messages import (
    Broken,
    Lead,
    Quota,
    Shared,
    Visit,
    Visited,
    VisitMessage,
)
from livescale.batching.lines.visit_merging import count_merged
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.faulty_runs import FaultyRequest, are_among
from livescale.batching.runs.held import Table
from livescale.batching.runs.run import BatchKey, Run, Segment
from livescale.values.routes import Partner
from livescale.values.types import InstanceId, LayerSpan, StageOf, WorkerRef

_RUNS_MAX = 2
"""In flight: the device is busy while what comes of the first is sent on."""

Tell = Callable[[Partner, VisitMessage], None]
"""Sends another instance a message, or hands it to this one's own leader or member."""


@dataclass(slots=True)
class _Lease:
    """Blocks for what one leader decides, where that is, and who is on its ways."""

    home: Partner
    reservation: int
    #: by the leader's numbers
    blocks: dict[int, int]
    workers: tuple[WorkerRef, ...]
    #: of a member of a pipeline, as in Quota
    stay: int = 0
    #: KV that others fetch, by their batches
    parts: dict[BatchKey, KvPlaces] = field(default_factory=dict)
    #: the leader's latest Run that came
    latest: Visit | None = None

    def is_void(self, visit: Visit) -> bool:
        """The leader has forgotten the Run. Its blocks may be those of later ones."""
        latest = self.latest
        return latest is not None and visit.run < latest.run and visit.run not in latest.flying


class Visitors:
    """What visits the instance, whose requests and blocks are the `batcher`'s. `has` says whether
    all layers of a span are here. An instance of a `stage` runs all of its layers in each Run.
    What waits is carried out together up to `merged_tokens_max` positions (0: one by one)."""

    def __init__(
        self,
        instance: InstanceId,
        batcher: Batcher,
        has: Callable[[LayerSpan], bool],
        tell: Tell,
        stage: StageOf | None = None,
        merged_tokens_max: int = 0,
    ) -> None:
        self._instance = instance
        self._stage = stage
        self._merged_tokens_max = merged_tokens_max
        self._pool, self._held = batcher.pool, batcher.held
        self._next_run_id = batcher.next_run_id
        self._layers = batcher.span.stop
        self._has = has
        self._tell = tell
        #: by the leaders that have blocks here
        self.leases: dict[Lead, _Lease] = {}
        self._line: deque[Visit] = deque()
        #: the first one ends first
        self._in_flight: deque[tuple[Run, tuple[Visit, ...]]] = deque()
        #: of the first Run in flight, as far as it is known
        self._faulty: tuple[FaultyRequest, ...] = ()
        #: visits whose rows are still to be sent on
        self._leaving: dict[BatchKey, None] = {}

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    # -- leaders --------------------------------------------------------------------------------

    def grant(
        self,
        lead: Lead,
        home: Partner,
        workers: Sequence[WorkerRef],
        blocks_max: int | None = None,
        stay: int = 0,
    ) -> None:
        """All blocks that are free are the leader's from now on (or `blocks_max` of them), whose
        ways are over these."""
        if lead in self.leases:
            return
        count = self._pool.free if blocks_max is None else min(blocks_max, self._pool.free)
        reservation = self._held.reserve([count * self._pool.block_tokens])
        (blocks,) = self._held.tables_of(reservation)
        lease = _Lease(home, reservation, dict(enumerate(blocks)), tuple(workers), stay)
        self.leases[lead] = lease
        self._tell(home, Quota(lead, self._instance, len(blocks), stay))

    def shrink(self, lead: Lead, blocks: Sequence[int]) -> None:
        """The leader runs nothing more, and needs no other blocks than these. Between two Runs."""
        lease = self.leases.get(lead)
        if lease is not None:
            lease.blocks = {n: lease.blocks[n] for n in blocks if n in lease.blocks}
            self._held.shrink_reserved(lease.reservation, tuple(lease.blocks.values()))

    def adopt(self, shared: Shared) -> Table | None:
        """The blocks of a request that belongs here from now on, whatever becomes of the leader.
        None: they are not here."""
        lease = self.leases.get(shared.lead)
        if lease is None or not all(number in lease.blocks for number in shared.blocks):
            return None
        table = tuple([lease.blocks[number] for number in shared.blocks])
        self._held.move_reserved(lease.reservation, table)
        for number in shared.blocks:
            del lease.blocks[number]
        return table

    def send_part(self, wanted: KvWanted, part: PartOf) -> KvPlaces | None:
        """KV of a layer in the leader's blocks, for an instance that a request was given to: where
        it lies (None: not here, or not any more)."""
        lease = self.leases.get(part.lead) if part.lead is not None else None
        if lease is None or not all(number in lease.blocks for number in part.blocks):
            return None
        table = tuple([lease.blocks[number] for number in part.blocks])
        if not 0 < part.tokens <= len(table) * self._pool.block_tokens:
            return None
        lease.parts[wanted.batch] = ((part.tokens, table),)
        return lease.parts[wanted.batch]

    def part(self, key: BatchKey) -> KvPlaces | None:
        """As `send_part` found it."""
        found = (lease.parts.get(key) for lease in self.leases.values())
        return next((places for places in found if places is not None), None)

    def revoke(self, lead: Lead) -> None:
        """The leader sends nothing more, or is gone. Between two Runs."""
        assert not self._in_flight, "a Run writes the leader's blocks"
        lease = self.leases.pop(lead, None)
        if lease is None:
            return
        self._held.cancel_reserved(lease.reservation)
        self._line = deque(visit for visit in self._line if visit.lead != lead)

    def lost(self, worker: WorkerRef) -> None:
        """Nothing reaches this worker, or comes from there. Between two Runs."""
        for lead, lease in list(self.leases.items()):
            if lease.home.worker == worker:
                self.revoke(lead)
            elif worker in lease.workers:
                # The leader may reach that one, and would wait.
                self._tell(lease.home, Broken(lead, self._instance, worker, lease.stay))

    def leave_all(self) -> None:
        """The instance goes. Between two Runs."""
        for lead, lease in list(self.leases.items()):
            self._tell(lease.home, Broken(lead, self._instance, stay=lease.stay))
            self.revoke(lead)

    # -- Runs -----------------------------------------------------------------------------------

    def expects(self, visit: Visit) -> bool:
        """Rows of the visit are wanted. Raises UnexpectedMessage if it cannot be run here."""
        lease = self.leases.get(visit.lead)
        if lease is None or lease.is_void(visit):
            return False
        if not visit.way or visit.way[0].partner.instance != self._instance:
            raise UnexpectedMessage(f"a visit for {visit.way[:1]} at instance {self._instance}")
        span = visit.way[0].span
        if not self._has(self._own(span)):
            raise UnexpectedMessage(f"layers {span} are not here")
        for segment in visit.segments:
            self._check(segment, lease)
        if not are_among(visit.faulty, visit.segments):
            raise UnexpectedMessage(f"faulty requests that run {visit.run} has not")
        return True

    def take(self, visit: Visit) -> bool:
        """It is run when all that came before it was. False: it is void, or its leader has no
        blocks here."""
        lease = self.leases.get(visit.lead)
        if lease is None or lease.is_void(visit):
            return False
        self._line.append(visit)
        return True

    def drop_void(self, visit: Visit) -> bool:
        """Runs that are void, as this one of their leader says, wait no more. Those in flight write
        before it does, which harms nothing. False: none of them waited."""
        lease = self.leases.get(visit.lead)
        if lease is None or (lease.latest is not None and lease.latest.run > visit.run):
            return False
        lease.latest = visit
        count = len(self._line)
        self._line = deque(v for v in self._line if v.lead != visit.lead or not lease.is_void(v))
        return len(self._line) < count

    def next(self) -> Run | None:
        """The next Run: it can be carried out behind the one in flight."""
        if not self._line or len(self._in_flight) == _RUNS_MAX:
            return None
        count = count_merged(self._line, self._merged_tokens_max)
        visits = tuple([self._line.popleft() for _ in range(count)])
        first = visits[0]
        run = Run(
            id=self._next_run_id(),
            span=self._own(first.way[0].span),
            segments=tuple([own for visit in visits for own in self._segments(visit)]),
            batch=first.key,
            is_visit=True,
            merged=tuple([(v.key, len(v.segments)) for v in visits]) if count > 1 else (),
        )
        self._in_flight.append((run, visits))
        return run

    def is_next(self, run: Run) -> bool:
        """The Run is a visit's."""
        return bool(self._in_flight) and self._in_flight[0][0].id == run.id

    def fail(self, faulty: Sequence[FaultyRequest]) -> None:
        """The first Run in flight, which is done next, gave nothing of these requests: their leader
        is told with what came of the others."""
        self._faulty = tuple(faulty)

    def done(self, token_ids: tuple[int, ...]) -> None:
        """The first Run in flight is over: rows go on, or tokens home."""
        run, visits = self._in_flight.popleft()
        sampled = iter(token_ids)
        for visit, part in zip(visits, run.parts, strict=True):
            self._ran(visit, tuple(itertools.islice(sampled, part.sampled)))
        self._faulty = ()

    def _ran(self, visit: Visit, token_ids: tuple[int, ...]) -> None:
        lease = self.leases[visit.lead]
        faulty = (*visit.faulty, *(one for one in self._faulty if are_among([one], visit.segments)))
        if len(visit.way) == 1:
            self._tell(lease.home, Visited(visit.lead, visit.run, token_ids, faulty))
            return
        # Token ids are for layer 0: behind that their number is enough.
        segments = tuple(
            msgspec.structs.replace(s, token_ids=(0,) * s.token_count) for s in visit.segments
        )
        onward = msgspec.structs.replace(visit, way=visit.way[1:], segments=segments, faulty=faulty)
        self._leaving[visit.key] = None
        self._tell(onward.way[0].partner, onward)

    # -- what can be asked ----------------------------------------------------------------------

    def holds(self, key: BatchKey) -> bool:
        """Rows of this name are waited for, used, or on their way out."""
        visits = (*self._line, *(visit for _, own in self._in_flight for visit in own))
        return key in self._leaving or any(visit.key == key for visit in visits)

    def sent(self, outbox: Iterable[tuple[WorkerRef, LiveMessage]]) -> None:
        """Rows of visits among these messages are on their way, or are not sent any more."""
        for _, message in outbox:
            if isinstance(message, Visit):
                self._leaving.pop(message.key, None)

    # -- helpers --------------------------------------------------------------------------------

    def _segments(self, visit: Visit) -> list[Segment]:
        """With the blocks that the leader's numbers stand for."""
        blocks = self.leases[visit.lead].blocks
        return [
            msgspec.structs.replace(s, block_table=tuple([blocks[n] for n in s.block_table]))
            for s in visit.segments
        ]

    def _own(self, span: LayerSpan) -> LayerSpan:
        """These layers by the instance's own numbers. Raises UnexpectedMessage."""
        if self._stage is not None:
            if span != self._stage.span(self._layers):
                raise UnexpectedMessage(f"layers {span} are not those of this stage")
            return LayerSpan(0, self._layers)
        if {1, self._layers - 1} & {span.start, span.stop}:
            raise UnexpectedMessage(f"layers {span}: embedding and head run with a decoder layer")
        return span

    @property
    def waiting(self) -> int:
        """Visits that wait for their turn, or are in flight."""
        return len(self._line) + sum(len(visits) for _, visits in self._in_flight)

    def ask_whether_over(self, but: Container[Lead]) -> None:
        """All other leaders are sent their quotas again. A pipeline that is over answers Disbanded:
        the first such message may have been lost with a connection."""
        for lead, lease in self.leases.items():
            if lead not in but:
                quota = Quota(lead, self._instance, len(lease.blocks), lease.stay)
                self._tell(lease.home, quota)

    def blocks_of(self, leads: Iterable[Lead]) -> int:
        """Blocks that these leaders have here."""
        return sum(len(self.leases[lead].blocks) for lead in leads if lead in self.leases)

    def _check(self, segment: Segment, lease: _Lease) -> None:
        """Raises UnexpectedMessage for positions and blocks that cannot be."""
        size = self._pool.block_tokens
        if segment.token_count < 1 or segment.first_position < 0:
            raise UnexpectedMessage(f"{segment.request}: {segment.token_count} positions")
        if segment.context_tokens > len(segment.block_table) * size:
            raise UnexpectedMessage(f"{segment.request}: {segment.context_tokens} positions")
        if not all(block in lease.blocks for block in segment.block_table):
            raise UnexpectedMessage(f"{segment.request}: blocks beyond {len(lease.blocks)}")
