"""The Serving of an instance of a stage: Runs of requests that go through one instance of each.

In the first stage it leads: it has requests, and their Runs visit an instance of each later stage
(`stage_leads.py`). In any stage it runs what visits, in the order in which that came
(`visitors.py`), over all layers that it has; in a later stage what waits together runs together
(`visit_merging.py`).

A member keeps blocks for each leader. Another leader, or one that is to have more or fewer of them,
gets its blocks when as many are free.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.batching.contract.live_messages import LiveMessage, UnexpectedMessage, refusal
from livescale.batching.contract.serving import Capabilities, Serving
from livescale.batching.contract.visit_counts import VisitCounts
from livescale.batching.contract.visit_messages import (
    Broken,
    Disbanded,
    Kept,
    Known,
    Lead,
    Quota,
    Visit,
    VisitMessage,
)
from livescale.batching.lines.stage_leads import StageLeads
from livescale.batching.lines.visitors import Visitors
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_pace import LivePace
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.messages.events import InstanceReported, TeamBroke
from livescale.values.routes import Partner, Pipeline, Taker
from livescale.values.types import InstanceId, LayerSpan, RequestId, StageOf, WorkerRef


class StageBatcher(Serving):
    """Of one instance. `batcher` has its KV blocks, and no requests."""

    def __init__(
        self, batcher: Batcher, instance: InstanceId, stage: StageOf, limits: LiveLimits
    ) -> None:
        self.batcher = batcher
        self._instance = instance
        self._stage = stage
        self._watermark = 0
        self._pipelines: tuple[Pipeline, ...] = ()
        #: of these, those whose leaders need nothing from here any more
        self._over: dict[Lead, None] = {}
        #: of leaders that know this instance
        self._stays: dict[Lead, int] = {}
        # In the first stage all Runs are one Batcher's, which chose them to be several.
        merges = limits.merges_runs and not stage.is_first
        self.visitors = Visitors(
            instance,
            batcher,
            self._has,
            self._tell,
            stage,
            merged_tokens_max=batcher.config.run_tokens_max if merges else 0,
        )
        self.leads = StageLeads(
            instance=instance,
            config=batcher.config,
            span=batcher.span,
            answer_ns=limits.answer_ns,
            tell=self._tell,
            revoke=self._revoke,
        )
        self._counts = VisitCounts()
        self._pace = LivePace(batcher, limits)
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []

    # -- pipelines ------------------------------------------------------------------------------

    def follow(self, pipelines: Sequence[Pipeline]) -> None:
        self._pipelines = tuple(pipelines)
        leads = dict.fromkeys(map(_lead, pipelines))
        self._over = {lead: None for lead in self._over if lead in leads}
        self.leads.follow(pipelines)
        self.visitors.ask_whether_over(leads)
        self._grant()

    @property
    def team_broke(self) -> TeamBroke | None:
        return self.leads.broke

    # -- requests and Runs ----------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        blocks, rate = self.batcher.config.kv_blocks, self._pace.prefill_tokens_per_s()
        return Capabilities(True, blocks, rate)

    def layers_arrived(self, watermark: int) -> None:
        self._watermark = watermark

    def add(self, spec: SequenceSpec) -> None:
        self.batcher.check(spec)
        self.leads.add(spec)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        return self.leads.cancel(request, attempt)

    def requests(self) -> list[tuple[RequestId, int]]:
        return self.leads.requests()

    def give_back(self) -> list[tuple[RequestId, int]]:
        own = self.leads.end_all()
        self.visitors.leave_all()
        self._counts.keep(self.visitors.holds)
        return own

    def next(self, steps_max: int = 1) -> Run | None:
        for visit in self.leads.next():
            self._take(visit)
        return self.visitors.next()

    def fail(self, run: Run, faulty: Sequence[FaultyRequest]) -> None:
        self.visitors.fail(faulty)

    def take_refused(self) -> list[tuple[RequestId, int, str]]:
        refused, self.leads.refused = self.leads.refused, []
        return refused

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        self._pace.ran(run, elapsed_ns, run.prefill_tokens)
        self._counts.done(run, elapsed_ns)
        self.visitors.done(tuple(token_id for (token_id,) in token_ids))
        return self.take_emitted()

    def take_emitted(self) -> list[EmittedTokens]:
        emitted, self.leads.emitted = self.leads.emitted, []
        return emitted

    def report(self) -> InstanceReported:
        """Of an instance that leads, what it has. Of others `running` are the leaders that have
        blocks here. Which of these are in use is known to the leaders of now; blocks of others
        count as used. Those of an instance that no pipeline leads over come to nothing else, and
        say nothing of what is needed: counted, they would wake an instance that drains."""
        pace = self._pace
        own = self.batcher.report(self._instance, 0, pace.prefill_tokens, pace.prefill_ns)
        leases = 0 if self._stage.is_first else len(self.visitors.leases)
        counts = self._counts.counts()
        used = self._blocks_left_over if self._pipelines else 0
        own = msgspec.structs.replace(own, kv_blocks_used=used, running=leases, stage=counts)
        return self.leads.report(own)

    # -- partners -------------------------------------------------------------------------------

    def drain_to(self, takers: Sequence[Taker]) -> None:
        """What it leads is finished here."""

    def take_returned(self) -> list[tuple[RequestId, int]]:
        returned, self.leads.returned = self.leads.returned, []
        return returned

    @property
    def is_alone(self) -> bool:
        is_idle = not self.leads and not self.visitors.leases
        return is_idle and not self._outbox and not self.leads.returned

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        if isinstance(message, Visit):
            return message.rows if self.visitors.expects(message) else None
        return None

    def may_come(self, peer: WorkerRef, message: LiveMessage) -> bool:
        if isinstance(message, Disbanded | Known | Broken | Kept):
            return not self.visitors.in_flight
        return isinstance(message, VisitMessage)

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, came_ns: int | None = None
    ) -> int | None:
        if isinstance(message, Quota):
            self.leads.take_quota(Partner(message.member, peer), message)
        elif isinstance(message, VisitMessage):
            self._take(message)
        elif (answer := refusal(message)) is not None:
            self._outbox.append((peer, answer))
        return None

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        self.visitors.sent(entry for entry in self._outbox if entry[0] == peer)
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]
        self._over.update((_lead(p), None) for p in self._pipelines if p.leader.worker == peer)
        self.leads.lost(peer)
        self.visitors.lost(peer)
        self._counts.keep(self.visitors.holds)
        self._grant()

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        self._counts.look(now_ns)
        self.leads.notice(now_ns)
        if not self.visitors.in_flight:
            self.leads.look(now_ns)
            self._grant()
        outbox, self._outbox = self._outbox, []
        self.visitors.sent(outbox)
        return outbox

    def deadline_ns(self) -> int | None:
        return self.leads.deadline_ns()

    def holds(self, key: BatchKey) -> bool:
        return self.visitors.holds(key)

    @property
    def kv_in_use(self) -> int:
        """Blocks of requests that are led from here, and of pipelines that are over."""
        return self.leads.kv_in_use + self._blocks_left_over

    def validate(self) -> None:
        """Check all parts against each other. Raises AssertionError."""
        self.batcher.pool.validate([*self.batcher.held.tables()])
        self.leads.validate()

    # -- helpers, in the order used -------------------------------------------------------------

    @property
    def _blocks_left_over(self) -> int:
        """Blocks that are taken for none of the pipelines that are wanted or led here."""
        wanted = dict.fromkeys([*map(_lead, self._pipelines), *self.leads.names])
        return self.batcher.pool.used - self.visitors.blocks_of(wanted)

    def _has(self, span: LayerSpan) -> bool:
        return span.stop <= self._watermark

    def _tell(self, partner: Partner, message: VisitMessage) -> None:
        if partner.instance == self._instance:
            self._take(message)
        else:
            self._outbox.append((partner.worker, message))

    def _take(self, message: VisitMessage) -> None:
        if isinstance(message, Visit):
            if self.visitors.drop_void(message):
                self._counts.keep(self.visitors.holds)
            if self.visitors.take(message):
                self._counts.came(message.key)
        elif isinstance(message, Disbanded):
            self._over[message.lead] = None
            self._stays.pop(message.lead, None)
            self._revoke(message.lead)
        elif isinstance(message, Known):
            self._over.pop(message.lead, None)
            self._stays[message.lead] = message.stay
            if message.stay > 1:
                self._revoke(message.lead)
        elif isinstance(message, Kept):
            raise UnexpectedMessage("a pipeline keeps no blocks when it ends")
        else:
            self.leads.take(message)

    def _revoke(self, lead: Lead) -> None:
        self.visitors.revoke(lead)
        self._counts.keep(self.visitors.holds)

    def _grant(self) -> None:
        """Blocks for leaders that have none yet, if there are enough. Between two Runs."""
        for pipeline in sorted(self._pipelines, key=lambda one: one.number):
            lead = _lead(pipeline)
            blocks = max(self.batcher.pool.blocks // pipeline.shares, 1)
            is_wanted = lead not in self._over and lead not in self.visitors.leases
            if is_wanted and self.batcher.pool.free >= blocks:
                workers = [member.partner.worker for member in pipeline.members]
                stay = self._stays.get(lead, 0)
                self.visitors.grant(lead, pipeline.leader, workers, blocks, stay)


def _lead(pipeline: Pipeline) -> Lead:
    return Lead(pipeline.leader.instance, pipeline.number)
