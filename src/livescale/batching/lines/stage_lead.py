"""A leader's side of a pipeline: its requests go through one instance of each later stage.

All members keep as many blocks, by the same numbers, so the leader's Batcher counts with one pool.
A request keeps its way, which is where its KV lies: it is chosen when the request comes, by how
many others go there. A Run has requests of one way only, and so has what the prefix index shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from livescale.batching.contract.visit_messages import Broken, Lead, Quota, Stop, Visit
from livescale.batching.lines.visit_lead import Leading, Way
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.messages.events import InstanceReported
from livescale.values.routes import Partner, Pipeline
from livescale.values.types import InstanceId, LayerSpan, RequestId

_RUNS_MAX = 1 << 16
"""Each way has its own bound."""


@dataclass(slots=True)
class _Led:
    """A request as it came, and the way that it goes."""

    spec: SequenceSpec
    way: Way


class StageLead(Leading):
    """Requests of the instance at `home`. `config` bounds that instance alone, `span` is its own.
    They are led when each stage has a member that has granted its blocks."""

    def __init__(self, lead: Lead, home: Partner, config: BatcherConfig, span: LayerSpan) -> None:
        super().__init__(lead, home)
        self._config, self._span = config, span
        #: of the pipeline as it is now
        self.stages: tuple[tuple[Stop, ...], ...] = ()
        self._shares = 1
        #: members that were left out: what is on its way through them comes back still
        self._leaving: dict[InstanceId, Partner] = {}
        self._quotas: dict[InstanceId, int] = {}
        self._stays: dict[InstanceId, int] = {}
        self._led: dict[tuple[RequestId, int], _Led] = {}

    # -- members --------------------------------------------------------------------------------

    def follow(self, pipeline: Pipeline) -> list[Partner]:
        """These are its members from now on. Requests that go through others end there. Returns
        those whose stay begins."""
        before, self._shares = self.partners(), pipeline.shares
        self.stages = tuple(
            tuple(Stop(member.partner, member.span) for member in stage)
            for stage in pipeline.stages
        )
        now = self.partners()
        new = [i for i in now if i not in before and i not in self._leaving]
        self._stays |= {i: self.stay(i) + 1 for i in new}
        self._leaving |= {i: partner for i, partner in before.items() if i not in now}
        for instance in now:
            self._leaving.pop(instance, None)
        return [now[i] for i in new]

    def stay(self, instance: InstanceId) -> int:
        """How many times it has become a member."""
        return self._stays.get(instance, 0)

    def is_of_now(self, message: Quota | Broken) -> bool:
        """It speaks of the present stay of its member, whose first blocks may be kept before the
        leader is known to know of it."""
        stay = self.stay(message.member)
        return message.stay == stay or (message.stay == 0 and stay == 1)

    def knows(self, instance: InstanceId) -> bool:
        """It is a member, or leaves. One that is not is told that all is over: what it has kept or
        offered before it learns of a later stay is void."""
        is_known = instance in self.everyone()
        if not is_known:
            self._stays[instance] = max(self.stay(instance), 1)
        return is_known

    def partners(self) -> dict[InstanceId, Partner]:
        """Its members, but for those that leave."""
        return {stop.partner.instance: stop.partner for stage in self.stages for stop in stage}

    def everyone(self) -> dict[InstanceId, Partner]:
        """Its members, and those that leave: something may be on its way through them."""
        return self._leaving | self.partners()

    def take_left(self) -> list[Partner]:
        """Members that were left out and that nothing goes through any more."""
        used = {stop.partner.instance for led in self._led.values() for stop in led.way}
        used |= {stop.partner.instance for _, way in self._flying.values() for stop in way}
        left = [partner for i, partner in self._leaving.items() if i not in used]
        for partner in left:
            del self._leaving[partner.instance]
            self._quotas.pop(partner.instance, None)
        return left

    def granted(self, quota: Quota) -> list[SequenceSpec]:
        """A member keeps blocks for what is decided here. Returns requests that these can never
        hold."""
        if quota.member not in self.partners() or not self.is_of_now(quota):
            return []
        self._quotas[quota.member] = quota.blocks
        self._count_anew()
        return self.begin_early()

    def begin_early(self) -> list[SequenceSpec]:
        """Requests that waited for a way have one, if there is one now. Returns those that its
        quotas can never hold."""
        if not self._early:
            return []
        self._count_anew()
        if not self._ways():
            return []
        return [spec for spec in self.take_early() if not self.add(spec)]

    def lost(self, instance: InstanceId) -> list[tuple[RequestId, int]]:
        """The member is gone: what had KV there is forgotten, and runs elsewhere. Between two
        Runs."""
        self._quotas.pop(instance, None)
        self._leaving.pop(instance, None)
        self.stages = tuple(
            tuple(stop for stop in stage if stop.partner.instance != instance)
            for stage in self.stages
        )
        gone = [pair for pair, led in self._led.items() if _goes_by(led.way, instance)]
        for number, (_, way) in [*self._flying.items()]:
            if _goes_by(way, instance):
                self._forget(number)
        for request, attempt in gone:
            self.cancel(request, attempt)
        return gone

    @property
    def is_waiting(self) -> bool:
        """For the end of a Run."""
        return bool(self._flying)

    @property
    def ahead_max(self) -> int:
        """Runs that one may wait for, itself included, on its way."""
        return len(self.stages) * (len(self.stages) + 1) * self._shares

    def suspects(self) -> list[InstanceId]:
        """Members that the longest Run on its way goes through."""
        way = next(iter(self._flying.values()))[1] if self._flying else ()
        return [stop.partner.instance for stop in way if stop.partner != self.home]

    # -- requests -------------------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> bool:
        """Accept a request that the instance could run. False if the quotas can never hold it."""
        self._count_anew()
        ways = self._ways()
        if self.batcher is None or not ways:
            self._early[spec.request] = spec
            return True
        uses = Counter(led.way for led in self._led.values())
        way = min(ways, key=lambda way: (uses[way], [stop.partner for stop in way]))
        # KV of an earlier stay is gone: nothing of it may be found.
        members = [stop.partner.instance for stop in way]
        through = ",".join(f"{instance}.{self.stay(instance)}" for instance in members)
        try:
            self.batcher.add(replace(spec, cache_salt=f"{spec.cache_salt}@{through}"))
        except ValueError:
            return False
        self._led[spec.request, spec.attempt] = _Led(spec, way)
        return True

    def is_too_long(self, spec: SequenceSpec) -> bool:
        """The quotas can never hold it."""
        if self.batcher is None:
            return False
        tokens_max = len(spec.prompt_ids) + spec.sampling.output_tokens_max - 1
        return tokens_max > self.batcher.tokens_held_max()

    def cancel(self, request: RequestId, attempt: int) -> bool:
        self._led.pop((request, attempt), None)
        return super().cancel(request, attempt)

    @property
    def has_work(self) -> bool:
        """There are requests, or Runs on their way."""
        is_busy = self.batcher is not None and self.batcher.has_work
        return bool(self._early or self._flying) or is_busy

    @property
    def blocks(self) -> int:
        """As many as every member has granted; 0 before all have."""
        return 0 if self.batcher is None else self.batcher.config.kv_blocks

    def report(self) -> InstanceReported:
        """What the requests here are to the instance that leads."""
        early_tokens = sum(spec.known_tokens for spec in self._early.values())
        if self.batcher is not None:
            own = self.batcher.report(self.home.instance, 0)
            queued = own.queued_prefill_tokens + early_tokens
            return msgspec.structs.replace(own, queued_prefill_tokens=queued)
        return InstanceReported(
            instance=self.home.instance,
            started=(),
            running=0,
            queued_prefill_tokens=early_tokens,
            kv_blocks_used=0,
            kv_blocks=0,
            emitted_tokens=0,
        )

    def take_all(self) -> list[tuple[RequestId, int]]:
        """Nothing is here any more: what was."""
        found = self.requests()
        for number in [*self._flying]:
            self._forget(number)
        for request, attempt in found:
            self.cancel(request, attempt)
        return found

    # -- Runs -----------------------------------------------------------------------------------

    def next(self, number: int) -> Visit | None:
        """The next Run, with this number, as a visit of the first member; None when nothing more
        could run now."""
        batcher = self.batcher
        run = batcher.next() if batcher is not None else None
        if run is None:
            return None
        first = run.segments[0]
        way = self._led[first.request, first.attempt].way
        return self._begin(number, run, way)

    def _ended(self, number: int, token_ids: Sequence[int]) -> list[EmittedTokens]:
        emitted = super()._ended(number, token_ids)
        for one in emitted:
            if one.finish_reason is not None:
                self._led.pop((one.request, one.attempt), None)
        return emitted

    def validate(self) -> None:
        """Raises AssertionError."""
        if self.batcher is not None:
            self.batcher.validate()
            assert self._led.keys() == {*self.batcher.requests()}, f"{self._led} are not led"

    # -- helpers, in the order used -------------------------------------------------------------

    def _count_anew(self) -> None:
        """The Batcher counts with the fewest blocks that a member has granted. One that comes later
        may have fewer, and gets no requests; but where a stage has such ones only, the Batcher
        begins anew with fewer, as soon as nothing is led."""
        if self.batcher is not None and (self._led or self._flying or self._ways()):
            return
        granted = [
            [blocks for stop in stage if (blocks := self._quotas.get(stop.partner.instance))]
            for stage in self.stages
        ]
        if not granted or not all(granted):
            return
        config = replace(self._config, kv_blocks=min(map(min, granted)))
        before = self.batcher
        self.batcher = Batcher(config, self._span, runs_max=_RUNS_MAX, pick=self._pick)
        if before is not None:
            self.batcher.count_on(before)

    def _granted(self, stage: Sequence[Stop]) -> list[Stop]:
        """Members that have as many blocks as the Batcher counts with."""
        return [s for s in stage if self._quotas.get(s.partner.instance, 0) >= max(self.blocks, 1)]

    def _ways(self) -> list[Way]:
        """Each member is on one of them at least. (All that could be would leave few requests for
        each, and so for each Run.)"""
        stages = [self._granted(stage) for stage in self.stages]
        if not stages or not all(stages):
            return []
        count = max(map(len, stages))
        return [tuple(stage[n % len(stage)] for stage in stages) for n in range(count)]

    def _pick(self, ready: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Of the way that has the fewest Runs in flight, the longest waiting of equal ones: as many
        as make all of its Runs alike."""
        flying = Counter(way for _, way in self._flying.values())
        totals = Counter(led.way for led in self._led.values())
        by_way: dict[Way, list[SequenceState]] = {}
        for sequence in ready:
            way = self._led[sequence.spec.request, sequence.spec.attempt].way
            by_way.setdefault(way, []).append(sequence)
        open_ways = [way for way in by_way if flying[way] <= len(way)]
        if not open_ways:
            return ()
        way = min(open_ways, key=lambda way: flying[way])
        return by_way[way][: -(-totals[way] // (len(way) + 1))]


def _goes_by(way: Way, instance: InstanceId) -> bool:
    return any(stop.partner.instance == instance for stop in way)
