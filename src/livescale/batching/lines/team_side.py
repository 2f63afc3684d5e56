"""An instance's part in teams: as a member, as a leader, and at the end of one.

What a leader decides is in `visit_lead.py`, what members do in `visitors.py`, and how KV goes on
when a team ends in `team_parting.py`. Here messages find their way to these, and requests to where
they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    KvLayer,
    KvWanted,
    LiveMessage,
    UnexpectedMessage,
)
from livescale.batching.contract.visit_messages import (
    Broken,
    Disbanded,
    Kept,
    Lead,
    Quota,
    Shared,
    Stop,
    Visit,
    Visited,
    VisitMessage,
)
from livescale.batching.lines.early_quotas import EarlyQuotas
from livescale.batching.lines.team_parting import Parting, check_shared, moving_pays
from livescale.batching.lines.visit_lead import Left, VisitLead
from livescale.batching.lines.visitors import Visitors
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.live.live_taker import is_here_already
from livescale.batching.runs.run import EmittedTokens, Run, SequenceSpec
from livescale.messages.events import TeamBroke
from livescale.values.routes import Partner, Team
from livescale.values.types import LayerSpan, RequestId, WorkerRef


class TeamSide:
    """Of the instance that `inner` serves. `has` says whether all layers of a span are there."""

    def __init__(self, inner: LiveBatcher, has: Callable[[LayerSpan], bool]) -> None:
        self._inner = inner
        self._instance = inner.instance
        self.visitors = Visitors(inner.instance, inner.batcher, has, self._tell)
        self.lead: VisitLead | None = None
        #: whose leader it is
        self._led: Team | None = None
        self.team: Team | None = None
        #: that team, which is led from here, is over before it was told to end
        self.broke: TeamBroke | None = None
        #: the last team that was led, while KV of requests that it had is fetched
        self._parting: Parting | None = None
        #: tokens that teams of this one have emitted, but for the one of now
        self.past_tokens = 0
        self._early_quotas = EarlyQuotas(inner.instance, inner.limits.answer_ns, self._send)
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []
        self._emitted: list[EmittedTokens] = []
        self._returned: list[tuple[RequestId, int]] = []
        self._refused: list[tuple[RequestId, int, str]] = []

    @property
    def is_idle(self) -> bool:
        """It is in no team, and nothing is left of one."""
        return self.lead is None and self._parting is None and not self.visitors.leases

    @property
    def is_alone(self) -> bool:
        """As of a Serving."""
        return self.is_idle and not self._early_quotas

    def join(self, team: Team | None) -> None:
        """Be a member of this team from now on; None: of no further one. Between two Runs.

        The leader of a team that ends waits for the Runs that are on their way. Members keep what
        they have granted until the leader has sent that nothing more comes.
        """
        if team == self.team:
            return
        self.team, self.broke = team, None
        if team is None:
            if self.lead is not None:
                self.lead.is_ending = True
            return
        # A team that was before is over, whether its leader knows that or not.
        if self.lead is not None:
            self._break_up()
        self.visitors.leave_all()
        lead = Lead(team.leader.instance, team.number)
        if team.leader.instance == self._instance:
            way = tuple(Stop(member.partner, member.span) for member in team.members)
            inner = self._inner.batcher
            self.lead = VisitLead(lead, team.leader, way, inner.config, inner.span)
            self._led = team
            for sequence in [*inner.lines.waiting.values()]:  # for the end of the load, so far
                inner.cancel(sequence.spec.request, sequence.spec.attempt)
                if not self.add(sequence.as_spec()):
                    self._inner.add(sequence.as_spec())
        self.visitors.grant(lead, team.leader, [m.partner.worker for m in team.members])
        # Behind its own blocks, which go back if a member has none.
        for one in self._early_quotas.told([team.number]):
            self._take_quota(one.peer, one.quota)

    def leave(self) -> None:
        """The instance goes, between two Runs: what it led runs elsewhere."""
        if self.lead is not None:
            self._break_up()
        if self._parting is not None:
            self._disband(self._parting.lead)
            self._parting = None
        self.visitors.leave_all()
        self._early_quotas.give_up_all()
        self._returned = []

    # -- requests and Runs ----------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> bool:
        """Lead a request that the instance could run; False if no team does."""
        # Logprobs and hidden rows would be known to the member that samples, alone.
        needs_more = spec.sampling.logprobs is not None or spec.sampling.embeds
        if self.lead is None or self.lead.is_ending or needs_more:
            return False
        return self.lead.add(spec)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        return self.lead is not None and self.lead.cancel(request, attempt)

    def requests(self) -> list[tuple[RequestId, int]]:
        """Those that are led from here."""
        return self.lead.requests() if self.lead is not None else []

    def next(self) -> Run | None:
        """The next Run of what visits, the instance's own requests included."""
        if self.lead is not None:
            while (visit := self.lead.next()) is not None:
                self.visitors.take(visit)
        return self.visitors.next()

    def done(self, token_ids: tuple[int, ...]) -> list[EmittedTokens]:
        """The first Run of what visits is over."""
        self.visitors.done(token_ids)
        return self.take_emitted()

    def take_emitted(self) -> list[EmittedTokens]:
        emitted, self._emitted = self._emitted, []
        return emitted

    def take_returned(self) -> list[tuple[RequestId, int]]:
        returned, self._returned = self._returned, []
        return returned

    def take_refused(self) -> list[tuple[RequestId, int, str]]:
        refused, self._refused = self._refused, []
        return refused

    # -- messages -------------------------------------------------------------------------------

    def take_message(self, peer: WorkerRef, message: LiveMessage) -> tuple[bool, int | None]:
        """Whether the message is of a team, and if a request was taken over with it (0: else
        None). Raises UnexpectedMessage."""
        if isinstance(message, Quota):
            self._take_quota(Partner(message.member, peer), message)
        elif isinstance(message, VisitMessage):
            self._take(message)
        elif isinstance(message, KvWanted) and message.part is not None and message.part.lead:
            is_here = self.visitors.send_part(message, message.part) is not None
            layer = KvLayer(message.batch, message.layer)
            self._outbox.append((peer, layer if is_here else Gone(message.batch)))
        elif isinstance(message, Handover) and message.shared is not None:
            return True, self._take_shared(peer, message, message.shared)
        else:
            return False, None
        return True, None

    def lost(self, peer: WorkerRef) -> None:
        """Nothing reaches this worker, or comes from there. Between two Runs."""
        self.visitors.sent(entry for entry in self._outbox if entry[0] == peer)
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]
        if self.lead is not None and any(s.partner.worker == peer for s in self.lead.way):
            self._broke(peer)
        self._early_quotas.lost(peer)
        self.visitors.lost(peer)

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        """As told of a Serving. A team whose members do not answer is broken up."""
        self._early_quotas.look(now_ns)
        lead = self.lead
        if lead is not None and lead.is_waiting:
            if lead.since_ns is None:
                lead.since_ns = now_ns
            is_late = now_ns > lead.since_ns + self._inner.limits.answer_ns
            if is_late and not self.visitors.in_flight:
                self._broke(lead.suspect())
        self._end_if_over(now_ns)
        self._part_if_over()
        outbox, self._outbox = self._outbox, []
        self.visitors.sent(outbox)
        return [(worker, self._if_here(message)) for worker, message in outbox]

    def deadline_ns(self) -> int | None:
        """When an answer is late."""
        lead, early_ns = self.lead, self._early_quotas.deadline_ns()
        if lead is None or not lead.is_waiting or lead.since_ns is None:
            return early_ns
        late_ns = lead.since_ns + self._inner.limits.answer_ns + 1
        return late_ns if early_ns is None else min(late_ns, early_ns)

    # -- helpers, in the order used -------------------------------------------------------------

    def _take_shared(self, peer: WorkerRef, message: Handover, shared: Shared) -> int | None:
        """A request of a team that ends: its blocks are here. Raises UnexpectedMessage."""
        for spec in message.requests:
            for attempt in self._inner.batcher.attempts(spec.request):
                if attempt < spec.attempt:
                    self._inner.cancel(spec.request, attempt)
        check_shared(self._inner.batcher, message)
        is_wanted = self._inner.is_full and not is_here_already(self._inner.batcher, message)
        table = self.visitors.adopt(shared) if is_wanted else None
        if table is None:
            self._outbox.append((peer, Declined(message.batch)))
            return None
        self._inner.taker.take_shared(peer, message, table)
        return 0

    def _if_here(self, message: LiveMessage) -> LiveMessage:
        """KV is Gone when the leader needs no more of its blocks."""
        if isinstance(message, KvLayer) and self.visitors.part(message.batch) is None:
            return Gone(message.batch)
        return message

    def _tell(self, partner: Partner, message: VisitMessage) -> None:
        if partner.instance == self._instance:
            self._take(message)
        else:
            self._send(partner, message)

    def _send(self, partner: Partner, message: VisitMessage) -> None:
        self._outbox.append((partner.worker, message))

    def _take_quota(self, peer: Partner, quota: Quota) -> None:
        """Of a member that was told sooner than this instance, of one of the team, or of one that
        was told when the team was over: Disbanded has come there before it kept blocks."""
        if self._early_quotas.keep(peer, quota):
            return
        if self.lead is None or self.lead.lead != quota.lead:
            self._send(peer, Disbanded(quota.lead))
        else:
            self._take(quota)

    def _take(self, message: VisitMessage) -> None:
        lead = self.lead
        if isinstance(message, Visit):
            self.visitors.take(message)
        elif isinstance(message, Disbanded):
            self.visitors.revoke(message.lead)
        elif isinstance(message, Kept):
            self.visitors.shrink(message.lead, message.blocks)
        elif lead is None or message.lead != lead.lead:
            return  # of a team that is over
        elif isinstance(message, Quota) and message.blocks < 1:
            self._broke(None)  # the member is full
        elif isinstance(message, Quota):
            for spec in lead.granted(message):
                self._inner.add(spec)
        elif isinstance(message, Visited):
            self._emitted += lead.take_visited(message, self._refused, self._returned)
        elif isinstance(message, Broken):
            self._broke(message.lost, lead.worker_of(message.member))
        else:
            raise UnexpectedMessage("the members of a team stay the same")

    def _end_if_over(self, now_ns: int) -> None:
        """The team has ended: requests go to its members in even shares."""
        lead = self.lead
        if lead is None or not lead.is_over or self.visitors.in_flight:
            return
        self.lead = None
        self._count(lead)
        left = lead.take_all()
        decoding = [one for one in left if one.table]
        moves = decoding if self._inner.is_full and self._moving_pays(lead, decoding) else []
        self._parting = Parting(self._inner, self.visitors, lead, self._tell)
        self._parting.share(moves, now_ns)
        others = [one.spec for one in left if not (moves and one.table)]
        for number, spec in enumerate(others):
            if number % len(lead.way):
                self._returned.append((spec.request, spec.attempt))
            else:
                self._inner.add(spec)

    def _moving_pays(self, lead: VisitLead, decoding: Sequence[Left]) -> bool:
        inner = self._inner
        tokens = sum(one.spec.known_tokens for one in decoding)
        is_full = 2 * tokens >= inner.batcher.config.run_tokens_max * len(lead.way)
        rate = inner.pace.prefill_tokens_per_s()
        assert self._led is not None
        return moving_pays(inner.limits.team_end, self._led, rate, in_full_runs=is_full)

    def _part_if_over(self) -> None:
        if self._parting is not None and self._parting.is_over:
            self._disband(self._parting.lead)
            self._parting = None

    def _broke(self, lost: WorkerRef | None, at: WorkerRef | None = None) -> None:
        """The way is broken, because the worker `at` (None: this one) does not reach another one
        (None: not known, or for another reason). Between two Runs."""
        assert self.lead is not None
        lead, home = self.lead.lead, self.lead.home.worker
        self._break_up()
        if self.team is not None and self.team.number == lead.number:
            between = (at or home, lost) if lost is not None else None
            self.broke = TeamBroke(lead.leader, lead.number, between)

    def _break_up(self) -> None:
        """What is led from here runs elsewhere. Between two Runs."""
        lead = self.lead
        assert lead is not None
        left = [one.spec for one in lead.take_all()]
        self._returned += [(spec.request, spec.attempt) for spec in left]
        lead.forget_runs()
        self.lead = None
        self._count(lead)
        self._disband(lead)

    def _count(self, lead: VisitLead) -> None:
        if lead.batcher is not None:
            self.past_tokens += lead.batcher.emitted_tokens

    def _disband(self, lead: VisitLead) -> None:
        self.visitors.revoke(lead.lead)
        for stop in lead.way:
            if stop.partner.instance != self._instance:
                self._tell(stop.partner, Disbanded(lead.lead))
