"""The instance on a worker: Runs, live batches that come and go, and what is reported of them.

A `Serving` decides what runs. Messages and requests are taken in when a Run ends, in the real world
and in the simulator alike: the next one may be in flight then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from livescale.batching.contract.live_messages import (
    Handover,
    KvLayer,
    LiveMessage,
    Taken,
    UnexpectedMessage,
    WithRows,
)
from livescale.batching.contract.serving import KvCame, Serving
from livescale.batching.contract.visit_messages import Visit
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.reports import REPORT_GAP_NS, ReportPace
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run
from livescale.member import effects
from livescale.member.attempts import HostedAttempts
from livescale.member.inputs import (
    ExecutorReady,
    MemberOrder,
    PeerMessage,
    PeerSent,
    RankLayers,
    RunEnded,
)
from livescale.member.owed_capacity import OwedCapacity
from livescale.member.presence import Presence
from livescale.messages.commands import ChangeDuty, SetCores, StartHolding
from livescale.messages.events import (
    BatchTaken,
    KvTaken,
    LiveStarted,
    RoleChanged,
    TeamBroke,
)
from livescale.values.routes import Duty, Partner, Team, reached
from livescale.values.stages import gives_rows
from livescale.values.types import Role, WorkerRef


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What instances of a worker are bound by. Devices of one `kind` compute alike; the last
    `resident_bytes` of the memory keep first layers of models that were given up. The worker begins
    with `own_cores`. Its executor may be an engine that schedules by itself (`is_engine`)."""

    kind: str
    live: LiveLimits
    resident_bytes: int = 0
    report_gap_ns: int = REPORT_GAP_NS
    own_cores: int = 1
    is_engine: bool = False


class HostedInstance:
    """One instance of a model, or one rank of it (only rank 0 gets requests)."""

    def __init__(
        self,
        order: StartHolding,
        serving: Serving,
        ready: ExecutorReady,
        limits: ServingLimits,
        attempts: HostedAttempts,
        emit: Callable[[effects.Effect], None],
    ) -> None:
        assert order.duty is not None, "an executor takes a model over for an instance"
        self.order, self.duty = order, order.duty
        self._layers = order.span.stop
        self._stage = ready.stage
        self._kv_layer_bytes, self._row_bytes = ready.kv_layer_bytes, ready.row_bytes
        self.capacity = OwedCapacity(order, limits.kind, ready.limits.run_tokens_max)
        self._own = Partner(order.duty.instance, order.holding.member)
        self._attempts = attempts
        self._emit = emit
        self.serving = serving
        self.runs_await_layers = serving.capabilities.runs_await_layers
        #: every layer is there and was reported
        self.is_loaded = False
        ranks = max(len(self.duty.workers), 1)
        self.layers = Presence(ranks, serving.layers_arrived, serving.layer_came)
        #: those in flight, the earliest first
        self._runs: deque[Run] = deque()
        self._pace = ReportPace(limits.report_gap_ns)
        #: there may be something to send to another instance, or to wait for from it
        self._has_partner = self.duty.live_order is not None or bool(self.duty.decodes_at)
        #: batches whose rows may lie with the shell
        self._rows: dict[BatchKey, None] = {}
        self._received_bytes = 0
        #: decoder layers of live batches that were run here
        self.live_layers = 0
        #: there may be KV of requests in its blocks
        self._has_kv = False
        #: the team that is over, as it was reported
        self._told_broke: TeamBroke | None = None
        if order.rank == 0:
            attempts.open(self.duty.instance, self.serving)
            self._start_live()

    def _start_live(self) -> None:
        for worker in reached(self.duty):
            self._emit(effects.Reach(worker))
        self.serving.decode_at(self.duty.decodes_at)
        if not self.serving.capabilities.whole_model_only:
            self._emit(effects.Report(LiveStarted(self.order.holding)))

    # -- what comes in --------------------------------------------------------------------------

    def may_obey(self, order: MemberOrder) -> bool:
        """The order takes nothing away from a Run in flight: it changes the role, where requests
        decode, or the cores of the next Run."""
        if isinstance(order, SetCores):
            return True
        if not isinstance(order, ChangeDuty) or order.holding != self.order.holding:
            return False
        role, decodes_at = order.duty.role, order.duty.decodes_at
        return msgspec.structs.replace(self.duty, role=role, decodes_at=decodes_at) == order.duty

    def change_duty(self, duty: Duty) -> None:
        """The instance has no partner any more, is to become empty, or to serve on: between two
        Runs. Or it is to decode elsewhere: at any time."""
        known = reached(self.duty)
        for worker in reached(duty):
            if worker not in known:
                self._emit(effects.Reach(worker))
        if self.duty.gives_to and not duty.gives_to:
            self.serving.work_alone()
        if (self.duty.role, self.duty.decodes_at) != (duty.role, duty.decodes_at):
            # A decode instance that computes prompts from now on ends its own requests.
            self.serving.decode_at(duty.decodes_at, keeps=self.duty.role is Role.DECODE)
        if self.duty.role is not duty.role:
            self._emit(effects.Report(RoleChanged(self.order.holding, duty.role)))
        if self.duty.team != duty.team:
            self._join(duty.team)
        if self.duty.pipelines != duty.pipelines:
            self.serving.follow(duty.pipelines)
        before, self.duty = self.duty, duty
        self.order = msgspec.structs.replace(self.order, duty=duty)
        if before.drains_to != duty.drains_to:
            self.serving.drain_to(duty.drains_to)
        self._has_partner = True

    def _join(self, team: Team | None) -> None:
        """The leader takes requests from now on."""
        self.serving.join(team)
        if team is not None and team.leader.instance == self.duty.instance:
            self._emit(effects.Report(LiveStarted(self.order.holding)))

    def take_message(self, now_ns: int, message: LiveMessage, sent: PeerSent) -> None:
        """The message of a peer, with what came along."""
        self._has_partner = True
        own = self.serving.requests() if isinstance(message, Taken) else []
        try:
            pull_ns = self._take(now_ns, message, sent)
        except UnexpectedMessage as error:
            self._emit(effects.Refuse(sent.peer, str(error)))
            return
        self._attempts.refused(self.serving.take_refused())
        emitted = self.serving.take_emitted()
        self._attempts.emitted(emitted)
        if own:
            left = dict.fromkeys(self.serving.requests())
            self._attempts.given(sent.peer, [pair for pair in own if pair not in left])
        if pull_ns is not None:
            assert isinstance(message, Handover), f"{message} is no batch"
            self._took(message, pull_ns, sent)
        for came in self.serving.take_kv_came():
            self._report_kv(came)

    def may_come(self, peer: WorkerRef, message: PeerMessage) -> bool:
        """The message can be taken although a Run is in flight."""
        return not isinstance(message, RankLayers) and self.serving.may_come(peer, message)

    def expected_bytes(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """How many bytes of rows or KV come with the message; None if they are not wanted.

        Raises UnexpectedMessage for a batch that cannot be.
        """
        tokens = self.serving.expected_tokens(peer, message)
        return self._bytes(message, tokens) if tokens is not None else None

    def peer_lost(self, peer: WorkerRef, *, is_refused: bool) -> None:
        """Nothing more comes from this worker, or goes there."""
        self._has_partner = True
        self.serving.peer_lost(peer, is_reachable=is_refused)

    def run_ended(self, ended: RunEnded) -> None:
        """The first Run in flight is over."""
        run = self._runs.popleft()
        if run.batch is not None:
            self.live_layers += run.span.decoder_layers(self._layers)
        if ended.faulty:
            self.serving.fail(run, ended.faulty)
            self._has_partner = True  # some may run elsewhere
        emitted = _came_of(self.serving, run, ended)
        self._attempts.refused(self.serving.take_refused())
        self._attempts.emitted(emitted)

    def shorten(self, steps: int) -> Run:
        """The Run in flight ends after so many of its steps."""
        (run,) = self._runs
        self._runs[0] = self.serving.shorten(run, steps)
        return self._runs[0]

    @property
    def is_running(self) -> bool:
        """A Run is in flight."""
        return bool(self._runs)

    @property
    def is_to_be_measured(self) -> bool:
        """Its rate of prefills is to be measured before it counts as loaded: that writes KV, so a
        live instance which was given work is judged by the Runs of that."""
        is_unused = not self._has_kv and not self.serving.requests()
        return self.capacity.is_owed and (is_unused or self.serving.capabilities.whole_model_only)

    def forget_reports(self) -> None:
        """The reader of the reports may be new: the next one goes out whatever it says."""
        self._pace.forget()
        self._told_broke = None

    def close(self, now_ns: int) -> None:
        """The instance goes: partners are told, and what is still here runs elsewhere."""
        self._talk(now_ns)
        if self.order.rank == 0:
            self._attempts.close()
        self._has_partner = True
        self._talk(now_ns)
        for key in self._rows:
            self._emit(effects.ForgetRows(key))

    # -- serving --------------------------------------------------------------------------------

    def go_on(self, now_ns: int, steps_max: int, *, is_awaited: bool) -> None:
        """Tell peers what there is to tell, report what changed, and start the next Runs; none if
        something waits for the end of those in flight (`is_awaited`)."""
        self._talk(now_ns)
        if not self.is_loaded and self.serving.capabilities.whole_model_only:
            # What was reported in a team is not true any more.
            if self._pace.has_reported:
                self._report(now_ns)
            return
        chosen: list[Run] = []
        while not is_awaited and (run := self.serving.next(steps_max)) is not None:
            chosen.append(run)
        if chosen:
            self._has_kv = True
            self._talk(now_ns)
        self._report(now_ns)
        for run in chosen:
            self._runs.append(run)
            for key in [part.key for part in run.parts]:
                self._rows.pop(key, None)
                if gives_rows(self._stage, run.span, self._layers):
                    self._rows[key] = None
            due_ns = self._pace.progress_due_ns
            self._emit(effects.Execute(run, due_ns, tells_layers=self.serving.tells_layers))

    def wake_ns(self) -> int | None:
        """When a partner's answer is late, or progress is worth a report."""
        if self._runs:
            return None
        deadline_ns = self.serving.deadline_ns() if self._has_partner else None
        report_ns = self._pace.progress_due_ns if self._pace.is_behind else None
        return min((t for t in (deadline_ns, report_ns) if t is not None), default=None)

    # -- helpers, in the order used -------------------------------------------------------------

    def _take(self, now_ns: int, message: LiveMessage, sent: PeerSent) -> int | None:
        """Raises UnexpectedMessage."""
        wanted_bytes = self.expected_bytes(sent.peer, message)
        if wanted_bytes is not None:
            if sent.size_bytes != wanted_bytes:
                # Asked for after its first part came: that was not kept.
                raise UnexpectedMessage(f"{type(message).__name__} came before it was asked for")
            self._received_bytes += wanted_bytes
            if isinstance(message, KvLayer):
                places = self.serving.kv_places(message.batch)
                self._emit(effects.WriteKv(message, places, sent.content))
            elif isinstance(message, Visit):
                self._has_kv = True
                self._rows[message.key] = None
                self._emit(effects.TakeOver(message, sent.content))
        return self.serving.take_message(sent.peer, message, now_ns, sent.came_ns)

    def _bytes(self, message: LiveMessage, tokens: int) -> int:
        return tokens * (self._row_bytes if isinstance(message, WithRows) else self._kv_layer_bytes)

    def _took(self, message: Handover, pull_ns: int, sent: PeerSent) -> None:
        """The batch is this worker's: its gateways and the controller learn that before any token
        of it."""
        self._has_kv = True
        if message.rows:
            self._rows[message.batch] = None
        self._emit(effects.TakeOver(message, sent.content))
        for holder in message.kv_at:
            self._emit(effects.Reach(holder.worker))
        wanted = []
        for spec, gateway in zip(message.requests, sent.gateways, strict=True):
            if gateway:
                wanted.append(spec)
                self._attempts.taken(gateway, spec, is_decoding=message.decoding)
            else:
                self.serving.cancel(spec.request, spec.attempt)
        taken = BatchTaken(
            instance=self._own.instance,
            worker=self._own.worker,
            target=message.batch.target,
            requests=tuple((spec.request, spec.attempt, spec.moves) for spec in wanted),
            next_layer=message.next_layer,
            tokens=sum(spec.known_tokens for spec in message.requests),
            row_bytes=sent.size_bytes,
            pull_ns=pull_ns,
        )
        self._emit(effects.Report(taken))

    def _report_kv(self, came: KvCame) -> None:
        taken = KvTaken(
            instance=self._own.instance,
            worker=self._own.worker,
            requests=came.requests,
            layers=came.layers,
            kv_bytes=came.layers * came.tokens * self._kv_layer_bytes,
            took_ns=came.last_ns - came.asked_ns,
            arrival_ns=came.last_ns - came.first_ns,
        )
        self._emit(effects.Report(taken))

    def _talk(self, now_ns: int) -> None:
        """Send peers what there is to send."""
        serving = self.serving
        if self.order.rank:  # only rank 0 gets requests, and has work to share
            return
        # What comes to a leader whose pipelines are over is given back at once.
        if self._has_partner or (self._stage is not None and not serving.is_alone):
            for peer, message in serving.take_outbox(now_ns):
                self._tell(peer, message)
            for request, attempt in serving.take_returned():
                self._attempts.returned(request, attempt)
            self._has_partner = not serving.is_alone
        if self._rows:
            for key in [key for key in self._rows if not serving.holds(key)]:
                del self._rows[key]
                self._emit(effects.ForgetRows(key))

    def _tell(self, peer: WorkerRef, message: LiveMessage) -> None:
        if isinstance(message, WithRows):
            specs = message.requests if isinstance(message, Handover) else ()
            gateways = tuple(self._attempts.gateway_of(spec.request) for spec in specs)
            size_bytes = self._bytes(message, message.rows)
            self._emit(effects.TellPeer(peer, message, gateways, size_bytes=size_bytes))
        elif isinstance(message, KvLayer):
            places = self.serving.kv_places(message.batch)
            size_bytes = self._bytes(message, sum(tokens for tokens, _ in places))
            self._emit(effects.TellPeer(peer, message, places=places, size_bytes=size_bytes))
        else:
            self._emit(effects.TellPeer(peer, message))

    def _report(self, now_ns: int) -> None:
        """Report that a team is over; the load if it changed, and is worth a message."""
        if self.order.rank != 0:
            return
        broke = self.serving.team_broke
        if broke != self._told_broke:
            self._told_broke = broke
            if broke is not None:
                self._emit(effects.Report(broke))
        report = self.serving.report()
        if self._received_bytes:
            report = msgspec.structs.replace(report, handover_bytes=self._received_bytes)
        if self._pace.is_due(now_ns, report):
            self._emit(effects.Report(report))

    def __repr__(self) -> str:
        return f"<HostedInstance of {self.serving!r}>"


def _came_of(serving: Serving, run: Run, ended: RunEnded) -> list[EmittedTokens]:
    if ended.step is not None:
        return serving.stepped(run, ended.step, ended.elapsed_ns)
    return serving.done(run, ended.token_ids, ended.elapsed_ns)
