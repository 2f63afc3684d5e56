"""What an instance of a model's first stage leads: the pipeline of now, and those that end.

A pipeline gets another number when its members are to keep more or fewer blocks for it. The old
one takes no further requests then, and ends with those that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from livescale.batching.contract.visit_messages import (
    Broken,
    Disbanded,
    Known,
    Lead,
    Quota,
    Visit,
    Visited,
)
from livescale.batching.lines.early_quotas import EarlyQuotas
from livescale.batching.lines.stage_lead import StageLead
from livescale.batching.lines.visitors import Tell
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import EmittedTokens, SequenceSpec
from livescale.messages.events import InstanceReported, TeamBroke
from livescale.values.routes import Partner, Pipeline
from livescale.values.types import InstanceId, LayerSpan, RequestId, WorkerRef

_OF_THE_INSTANCE = ("instance", "kv_blocks", "handovers", "prefill_tokens", "prefill_ns", "stage")
"""What a pipeline does not add to in a report."""


class StageLeads:
    """Of the instance with this number. `config` bounds that alone, `span` is its own; an answer
    is late after `answer_ns` for each Run that may be before the one that is waited for."""

    def __init__(
        self,
        instance: InstanceId,
        config: BatcherConfig,
        span: LayerSpan,
        answer_ns: int,
        tell: Tell,
        revoke: Callable[[Lead], None],
    ) -> None:
        """`revoke` takes the blocks of this instance itself back from a pipeline that is over."""
        self._instance = instance
        self._config, self._span = config, span
        self._answer_ns = answer_ns
        self._tell, self._revoke = tell, revoke
        #: by number, those that end included
        self._leads: dict[int, StageLead] = {}
        #: Runs of all pipelines: by their numbers members know the rows of each
        self._runs = 0
        self._early_quotas = EarlyQuotas(instance, answer_ns, tell)
        #: what an answer took that came too late; less with each one that comes
        self._slowest_ns = 0
        self.emitted: list[EmittedTokens] = []
        self.returned: list[tuple[RequestId, int]] = []
        #: what can be computed nowhere, and why
        self.refused: list[tuple[RequestId, int, str]] = []
        #: the pipeline of now that lost a member which may be there
        self.broke: TeamBroke | None = None
        #: of pipelines that are over
        self._past_tokens = self._past_preemptions = 0

    def __bool__(self) -> bool:
        """It leads, or may have to."""
        return bool(self._leads or self._early_quotas)

    # -- pipelines ------------------------------------------------------------------------------

    def follow(self, pipelines: Sequence[Pipeline]) -> None:
        """Those of these that the instance leads are the ones of now. Between two Runs."""
        led = [p for p in pipelines if p.leader.instance == self._instance]
        for pipeline in led:
            lead = self._leads.get(pipeline.number)
            if lead is None:
                name = Lead(self._instance, pipeline.number)
                lead = StageLead(name, pipeline.leader, self._config, self._span)
                self._leads[pipeline.number] = lead
            for partner in lead.follow(pipeline):
                if partner.instance != self._instance:
                    self._tell(partner, Known(lead.lead, lead.stay(partner.instance)))
            # One that was leaving and stays after all keeps its blocks, and grants none anew.
            self.returned += [(spec.request, spec.attempt) for spec in lead.begin_early()]
        numbers = [pipeline.number for pipeline in led]
        for number, lead in self._leads.items():
            lead.is_ending = number not in numbers
        for one in self._early_quotas.told([pipeline.number for pipeline in pipelines]):
            self.take_quota(one.peer, one.quota)

    def end_all(self) -> list[tuple[RequestId, int]]:
        """The instance goes. Returns what was here."""
        own = self.requests()
        for lead in [*self._leads.values()]:
            self._end(lead)
        self._early_quotas.give_up_all()
        self.returned = []
        return own

    # -- requests and Runs ----------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> None:
        """Raises ValueError for a request that the pipeline of now can never hold. Where there is
        none, as while members change, the request is returned."""
        for request, attempt in [pair for pair in self.requests() if pair[0] == spec.request]:
            if attempt >= spec.attempt:
                raise ValueError(f"request {request} is on this instance in a later attempt")
            self.cancel(request, attempt)
        lead = next((lead for lead in self._leads.values() if not lead.is_ending), None)
        if lead is not None and lead.add(spec):
            return
        if lead is not None and lead.is_too_long(spec):
            raise ValueError(
                f"request {spec.request} needs more KV than the {lead.blocks} blocks"
                " that each stage keeps for a pipeline"
            )
        self.returned.append((spec.request, spec.attempt))

    def cancel(self, request: RequestId, attempt: int) -> bool:
        return any(lead.cancel(request, attempt) for lead in self._leads.values())

    def requests(self) -> list[tuple[RequestId, int]]:
        return [pair for lead in self._leads.values() for pair in lead.requests()]

    def next(self) -> list[Visit]:
        """All Runs that can begin their way now."""
        found = []
        for lead in self._leads.values():
            while (visit := lead.next(self._runs + 1)) is not None:
                self._runs += 1
                found.append(visit)
        return found

    # -- messages -------------------------------------------------------------------------------

    def take_quota(self, peer: Partner, quota: Quota) -> None:
        """Of a member that was told sooner than this instance, of one that is wanted, or of one
        that has not received that all is over."""
        if self._early_quotas.keep(peer, quota):
            return
        lead = self._leads.get(quota.lead.number)
        if lead is None or lead.lead != quota.lead or not lead.knows(quota.member):
            self._tell(peer, Disbanded(quota.lead))
        else:
            self.take(quota)

    def take(self, message: Quota | Visited | Broken) -> None:
        """What a member sends its leader. Raises UnexpectedMessage."""
        lead = self._leads.get(message.lead.number)
        if lead is None or message.lead != lead.lead:
            return  # of a pipeline that is over
        if isinstance(message, Quota):
            # Where they come again, they are refused with the reason.
            too_long = lead.granted(message)
            self.returned += [(spec.request, spec.attempt) for spec in too_long]
        elif isinstance(message, Visited):
            self._slowest_ns -= self._slowest_ns // 8
            self.emitted += lead.take_visited(message, self.refused, self.returned)
        else:
            self._member_broke(lead, message)

    def lost(self, worker: WorkerRef) -> None:
        """Nothing reaches this worker, or comes from there. Between two Runs."""
        self._early_quotas.lost(worker)
        for lead in [*self._leads.values()]:
            for instance, partner in lead.everyone().items():
                if partner.worker == worker:
                    self._loses(lead, instance, (lead.home.worker, worker))

    def notice(self, now_ns: int) -> None:
        """What is waited for, is waited for from now on at the latest. A pipeline of which no order
        came may never have begun: a next controller did not go on with it. If the order comes, its
        members are told again."""
        self._early_quotas.look(now_ns)
        for lead in self._leads.values():
            if lead.is_waiting and lead.since_ns is None:
                lead.since_ns = now_ns

    def look(self, now_ns: int) -> None:
        """Between two Runs: answers that are late, and members that are not needed any more."""
        for lead in [*self._leads.values()]:
            late_ns = self._late_ns(lead)
            if late_ns is not None and now_ns >= late_ns:
                # Rows may take longer on these links: the next answer gets more time.
                self._slowest_ns = now_ns - (lead.since_ns or now_ns)
                for instance in lead.suspects():
                    self._loses(lead, instance, None)
            for partner in lead.take_left():
                self._tell(partner, Disbanded(lead.lead))
            # No further way comes for one that ends; else what was led may have ended meanwhile.
            none = lead.take_early() if lead.is_ending else lead.begin_early()
            self.returned += [(spec.request, spec.attempt) for spec in none]
            if lead.is_ending and (lead.batcher is None or not lead.has_work):
                self._end(lead)

    def deadline_ns(self) -> int | None:
        """When an answer is late."""
        late = [self._late_ns(lead) for lead in self._leads.values()]
        late.append(self._early_quotas.deadline_ns())
        return min((late_ns for late_ns in late if late_ns is not None), default=None)

    # -- what can be asked ----------------------------------------------------------------------

    @property
    def names(self) -> list[Lead]:
        """Of its pipelines, those that end included."""
        return [lead.lead for lead in self._leads.values()]

    def report(self, own: InstanceReported) -> InstanceReported:
        """The instance's own report, with what it leads."""
        own = msgspec.structs.replace(
            own, emitted_tokens=self._past_tokens, preemptions=self._past_preemptions
        )
        for lead in self._leads.values():
            own = _sum(own, lead.report())
        return own

    @property
    def kv_in_use(self) -> int:
        """Blocks of requests."""
        batchers = (lead.batcher for lead in self._leads.values())
        return sum(batcher.pool.used for batcher in batchers if batcher is not None)

    def validate(self) -> None:
        """Raises AssertionError."""
        for lead in self._leads.values():
            lead.validate()

    # -- helpers, in the order used -------------------------------------------------------------

    def _member_broke(self, lead: StageLead, message: Broken) -> None:
        """A member goes, or does not reach another one. What one of an earlier stay did not reach
        is known by then, or comes again."""
        if message.lost is not None and not lead.is_of_now(message):
            return
        members = lead.everyone()
        lost = [i for i, partner in members.items() if partner.worker == message.lost]
        member = members.get(message.member)
        if message.lost is None or not lost:
            self._loses(lead, message.member, None)
        else:
            self._loses(lead, lost[0], (member.worker, message.lost) if member else None)

    def _late_ns(self, lead: StageLead) -> int | None:
        """When the answer that it waits for is late (None: it waits for none)."""
        if not lead.is_waiting or lead.since_ns is None:
            return None
        return lead.since_ns + max(self._answer_ns * lead.ahead_max, 2 * self._slowest_ns)

    def _loses(
        self, lead: StageLead, instance: InstanceId, between: tuple[WorkerRef, WorkerRef] | None
    ) -> None:
        """Nothing goes through this member any more. Between two Runs."""
        partner, is_member = lead.everyone().get(instance), instance in lead.partners()
        if partner is None or instance == self._instance:
            return
        self.returned += lead.lost(instance)
        self._tell(partner, Disbanded(lead.lead))
        if is_member and not lead.is_ending:
            self.broke = TeamBroke(self._instance, lead.lead.number, between)

    def _end(self, lead: StageLead) -> None:
        """The pipeline is over: what it had runs elsewhere. Between two Runs."""
        self.returned += lead.take_all()
        del self._leads[lead.lead.number]
        if lead.batcher is not None:
            self._past_tokens += lead.batcher.emitted_tokens
            self._past_preemptions += lead.batcher.room.preemptions
        self._revoke(lead.lead)
        for partner in [*lead.partners().values(), *lead.take_left()]:
            if partner.instance != self._instance:
                self._tell(partner, Disbanded(lead.lead))


def _sum(one: InstanceReported, other: InstanceReported) -> InstanceReported:
    """Both together."""
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in one.__struct_fields__
        if name not in _OF_THE_INSTANCE
    }
    return msgspec.structs.replace(one, **sums)
