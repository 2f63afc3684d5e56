"""A leader's side of visits: requests that are its own, computed by several instances in turn.

The Batcher counts with as many KV blocks as the member with the fewest has granted. So admission,
growth and preemption are decided here, and no member can run out. With m members m Runs and one
more are in flight, of other requests each (λScale §4.3: pipelining over requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from livescale.batching.contract.live_messages import UnexpectedMessage
from livescale.batching.contract.visit_messages import Lead, Quota, Stop, Visit, Visited
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, Run, Segment, SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.values.routes import Partner
from livescale.values.types import InstanceId, LayerSpan, RequestId, WorkerRef

Way = tuple[Stop, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """A request of a team that ends, with all tokens generated so far. Of one that decodes the KV
    lies in these blocks of the quotas, unless one before it has some of them, too."""

    spec: SequenceSpec
    table: tuple[int, ...] = ()


class Leading:
    """Requests of a leader at `home`, and their Runs on the way through others."""

    def __init__(self, lead: Lead, home: Partner) -> None:
        self.lead = lead
        self.home = home
        #: when all members that it takes have granted their blocks
        self.batcher: Batcher | None = None
        #: nothing new is to be led
        self.is_ending = False
        #: since when an answer is waited for (None: since the next look at the clock)
        self.since_ns: int | None = None
        #: requests that cannot be led yet, in order
        self._early: dict[RequestId, SequenceSpec] = {}
        self._flying: dict[int, tuple[Run, Way]] = {}

    def cancel(self, request: RequestId, attempt: int) -> bool:
        early = self._early.get(request)
        if early is not None and early.attempt == attempt:
            del self._early[request]
            return True
        return self.batcher is not None and self.batcher.cancel(request, attempt)

    def requests(self) -> list[tuple[RequestId, int]]:
        early = [(spec.request, spec.attempt) for spec in self._early.values()]
        return early if self.batcher is None else [*self.batcher.requests(), *early]

    def take_early(self) -> list[SequenceSpec]:
        """Requests that cannot be led yet: none waits any more."""
        early, self._early = [*self._early.values()], {}
        return early

    def take_visited(
        self,
        visited: Visited,
        refused: list[tuple[RequestId, int, str]],
        returned: list[tuple[RequestId, int]],
    ) -> list[EmittedTokens]:
        """What came of a Run. Requests that a member could not compute are forgotten, and are
        `refused` or `returned` from now on. Raises UnexpectedMessage."""
        run, _ = self._flying.get(visited.run, (None, ()))
        here = {(s.request, s.attempt) for s in (() if run is None else run.segments)}
        for one in visited.faulty:
            if (one.request, one.attempt) in here and self.cancel(one.request, one.attempt):
                one.tell(refused, returned)
        try:
            return self._ended(visited.run, visited.token_ids)
        except ValueError as error:
            raise UnexpectedMessage(str(error)) from None

    # -- helpers --------------------------------------------------------------------------------

    def _begin(self, number: int, run: Run, way: Way) -> Visit:
        """The Run goes its way, as a visit of the first member."""
        if not self._flying:
            self.since_ns = None
        self._flying[number] = run, way
        segments = tuple(map(_as_sent, run.segments))
        return Visit(self.lead, self.home, number, way, segments, tuple(self._flying))

    def _ended(self, number: int, token_ids: Sequence[int]) -> list[EmittedTokens]:
        """The Run has gone all the way. Tokens of a Run that is not known are left out."""
        run, _ = self._flying.get(number, (None, ()))
        if run is None or self.batcher is None:
            return []
        if len(token_ids) != sum(segment.samples for segment in run.segments):
            return []
        del self._flying[number]
        self.since_ns = None
        return self.batcher.done(run, [[token_id] for token_id in token_ids])

    def _forget(self, number: int) -> None:
        """The Run does not come back."""
        run, _ = self._flying[number]
        for segment in run.segments:
            self.cancel(segment.request, segment.attempt)
        self._ended(number, (0,) * sum(segment.samples for segment in run.segments))


class VisitLead(Leading):
    """Requests whose Runs go `way`. `config` bounds the leader's instance alone."""

    def __init__(
        self, lead: Lead, home: Partner, way: Way, config: BatcherConfig, span: LayerSpan
    ) -> None:
        super().__init__(lead, home)
        self.way = way
        self._config = config
        self._span = span
        self._quotas: dict[InstanceId, int] = {}

    # -- members --------------------------------------------------------------------------------

    def granted(self, quota: Quota) -> list[SequenceSpec]:
        """A member keeps blocks for what is decided here: one at least. Returns requests that these
        can never hold."""
        self.since_ns = None
        if quota.member in {stop.partner.instance for stop in self.way}:
            self._quotas[quota.member] = quota.blocks
        if self.batcher is not None or len(self._quotas) < len(self.way):
            return []
        config = replace(self._config, kv_blocks=min(self._quotas.values()))
        self.batcher = Batcher(config, self._span, runs_max=len(self.way) + 1)
        return [spec for spec in self.take_early() if not self.add(spec)]

    @property
    def is_waiting(self) -> bool:
        """For quotas, or for the end of a Run."""
        return self.batcher is None or bool(self._flying)

    def suspect(self) -> WorkerRef | None:
        """Whose answer is late, if that can be one member only."""
        others = [stop.partner for stop in self.way if stop.partner != self.home]
        if self.batcher is None:
            others = [partner for partner in others if partner.instance not in self._quotas]
        return others[0].worker if len(others) == 1 else None

    def worker_of(self, member: InstanceId) -> WorkerRef | None:
        """None: that is no member."""
        partners = (stop.partner for stop in self.way)
        return next((p.worker for p in partners if p.instance == member), None)

    # -- requests -------------------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> bool:
        """Accept a request that the instance could run. False if the quotas can never hold it."""
        if self.batcher is None:
            self._early[spec.request] = spec
            return True
        try:
            self.batcher.add(spec)
        except ValueError:
            return False
        return True

    def take_all(self) -> list[Left]:
        """Nothing is here any more: what was, in the order of arrival."""
        found = [Left(spec) for spec in self.take_early()]
        batcher = self.batcher
        if batcher is not None:
            lines = batcher.lines
            running = (*lines.running.values(), *lines.waiting.values())
            claimed: dict[int, None] = {}
            ordered = sorted(running, key=lambda s: s.order)
            found = [_left(sequence, claimed) for sequence in ordered] + found
            for left in found:
                batcher.cancel(left.spec.request, left.spec.attempt)
        return found

    # -- Runs -----------------------------------------------------------------------------------

    def next(self) -> Visit | None:
        """The next Run, as a visit of the first member; None when nothing more could run now."""
        batcher = self.batcher
        if batcher is None or self.is_ending or len(self._flying) >= batcher.runs_max:
            return None
        run = batcher.next()
        return self._begin(run.id, run, self.way) if run is not None else None

    @property
    def is_over(self) -> bool:
        """It ends, and no Run is on its way."""
        return self.is_ending and not self._flying

    def forget_runs(self) -> None:
        """None of those in flight comes back."""
        for number in [*self._flying]:
            self._forget(number)


def _as_sent(segment: Segment) -> Segment:
    """As the first member gets it: known tokens are for the one that samples, as they are now."""
    known = segment.samples
    return msgspec.structs.replace(
        segment,
        token_ids=tuple(segment.token_ids),
        prompt_ids=segment.prompt_ids if known else (),
        generated_ids=tuple(segment.generated_ids) if known else (),
    )


def _left(sequence: SequenceState, claimed: dict[int, None]) -> Left:
    """With its KV, if that is all there: the request decodes. Blocks can go with one request only,
    which has `claimed` them."""
    table = sequence.block_table
    is_decoding = sequence.tokens_left == 1 and bool(sequence.generated)
    if not is_decoding or any(block in claimed for block in table):
        return Left(sequence.as_spec())
    claimed.update(dict.fromkeys(table))
    return Left(sequence.as_spec(), table)
