"""The instance on a worker: Runs, live batches that come and go, and what is reported of them.

The LiveBatcher decides what runs. Messages and requests are taken in when a Run ends, in the real
world and in the simulator alike: the next one may be in flight then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveLimits
from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.live_messages import (
    BatchKey,
    Gone,
    Handover,
    KvLayer,
    LiveMessage,
    Offer,
    Taken,
)
from livescale.batching.reports import REPORT_GAP_NS, ReportPace, load_report
from livescale.batching.run import Run
from livescale.member.attempts import HostedAttempts
from livescale.member.effects import (
    Effect,
    Execute,
    ForgetRows,
    Reach,
    Refuse,
    Report,
    TakeOver,
    TellPeer,
    WriteKv,
)
from livescale.member.inputs import ExecutorReady, PeerSent, RunEnded
from livescale.member.passing import UnexpectedMessage, check_handover, check_offer
from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, LiveStarted
from livescale.types import WorkerRef


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What instances of a worker are bound by. Devices of one `kind` compute alike; the last
    `resident_bytes` of the memory keep first layers of models that were given up."""

    kind: str
    live: LiveLimits
    resident_bytes: int = 0
    report_gap_ns: int = REPORT_GAP_NS


class Serving:
    """One instance of a model, or one rank of it (only rank 0 gets requests)."""

    def __init__(
        self,
        order: StartHolding,
        ready: ExecutorReady,
        limits: ServingLimits,
        attempts: HostedAttempts,
        emit: Callable[[Effect], None],
    ) -> None:
        assert order.duty is not None, "an executor takes a model over for an instance"
        self.order, self.duty = order, order.duty
        self._layers = order.span.stop
        self._kv_layer_bytes, self._row_bytes = ready.kv_layer_bytes, ready.row_bytes
        self._attempts = attempts
        self._emit = emit
        batcher = Batcher(ready.limits, order.span)
        self.live = LiveBatcher(batcher, self.duty.instance, limits.live, self.duty.pairing)
        #: every layer is there and was reported
        self.is_loaded = False
        #: layers that all ranks have, as far as rank 0 knows
        self._watermarks = [0] * max(len(self.duty.workers), 1)
        #: those in flight, the earliest first
        self._runs: deque[Run] = deque()
        self._pace = ReportPace(limits.report_gap_ns)
        #: there may be something to send to another instance, or to wait for from it
        self._has_partner = self.duty.pairing is not None
        #: batches whose rows may lie with the shell, and the peers that handed batches over
        self._rows: dict[BatchKey, None] = {}
        self._giver_of: dict[BatchKey, WorkerRef] = {}
        self._handovers = self._received_bytes = 0
        #: decoder layers of live batches that were run here
        self.live_layers = 0
        if order.rank == 0:
            attempts.open(self.duty.instance, self.live)
            self._start_live()

    def _start_live(self) -> None:
        pairing = self.duty.pairing
        if pairing is not None and pairing.source is not None:
            self._emit(Reach(pairing.source))
        if self.live.is_live:
            self._emit(Report(LiveStarted(self.order.holding)))

    # -- what comes in --------------------------------------------------------------------------

    def rank_has(self, rank: int, watermark: int) -> None:
        """The rank has layers 0…watermark-1: the instance can run those that all ranks have."""
        self._watermarks[rank] = max(self._watermarks[rank], watermark)
        least = min(self._watermarks)
        if least > self.live.watermark:
            self.live.layers_arrived(least)

    def take_message(self, now_ns: int, message: LiveMessage, sent: PeerSent) -> None:
        """The message of a peer, with what came along."""
        self._has_partner = True
        peer = sent.peer
        try:
            if isinstance(message, Offer):
                check_offer(message)
            wanted_bytes = self.expected_bytes(peer, message)
            if wanted_bytes is not None and sent.size_bytes != wanted_bytes:
                # Asked for after its first part came: that was not kept.
                raise UnexpectedMessage(f"{type(message).__name__} came before it was asked for")
        except UnexpectedMessage as error:
            self._emit(Refuse(peer, str(error)))
            return
        if wanted_bytes is not None:
            self._received_bytes += wanted_bytes
        if isinstance(message, KvLayer) and wanted_bytes is not None:
            places = self.live.batches.kv_places(message.batch)
            self._emit(WriteKv(message, places, sent.content))
        own = self.live.requests() if isinstance(message, Taken) else []
        self.live.take_message(peer, message, now_ns)
        if own:
            left = dict.fromkeys(self.live.requests())
            self._attempts.given(now_ns, peer, [pair for pair in own if pair not in left])
        for handover, pull_ns in self.live.taker.take_taken():
            self._took(handover, pull_ns, sent)

    def expected_bytes(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """How many bytes of rows or KV come with the message; None if they are not wanted.

        Raises UnexpectedMessage for a batch that cannot be.
        """
        if isinstance(message, Handover):
            pulled = self.live.taker.pulled(peer, message.batch)
            if pulled is None:
                return None
            check_handover(self.live, message, pulled)
            return message.rows * self._row_bytes
        if isinstance(message, KvLayer):
            key = message.batch
            if self._giver_of.get(key) != peer or not self.live.taker.wants_kv(key, message.layer):
                return None
            return self._kv_bytes(self.live.batches.kv_places(key))
        return None

    def peer_lost(self, peer: WorkerRef, *, is_refused: bool) -> None:
        """Nothing more comes from this worker, or goes there."""
        self._has_partner = True
        self.live.peer_lost(peer, is_reachable=is_refused)

    def run_ended(self, ended: RunEnded) -> None:
        """The first Run in flight is over."""
        run = self._runs.popleft()
        if self.live.key_of(run) is not None:
            self.live_layers += min(run.span.stop, self._layers - 1) - max(run.span.start, 1)
        emitted = self.live.commit_steps(run, ended.token_ids)
        self.live.ran(run, ended.elapsed_ns)
        if emitted:
            self._attempts.emitted(emitted)

    def shorten(self, steps: int) -> Run:
        """The Run in flight ends after so many of its steps."""
        (run,) = self._runs
        self._runs[0] = self.live.batcher.shorten(run, steps)
        return self._runs[0]

    @property
    def is_running(self) -> bool:
        """A Run is in flight."""
        return bool(self._runs)

    def forget_reports(self) -> None:
        """The reader of the reports may be new: the next one goes out whatever it says."""
        self._pace.forget()

    def close(self, now_ns: int) -> None:
        """The instance goes: partners are told, and what is still here runs elsewhere."""
        self._talk(now_ns)
        if self.order.rank == 0:
            self._attempts.close()
        self._has_partner = True
        self._talk(now_ns)
        for key in self._rows:
            self._emit(ForgetRows(key))

    # -- serving --------------------------------------------------------------------------------

    def go_on(self, now_ns: int, steps_max: int, *, is_awaited: bool) -> None:
        """Tell peers what there is to tell, report what changed, and start the next Runs; none if
        something waits for the end of those in flight (`is_awaited`)."""
        self._talk(now_ns)
        if not (self.is_loaded or self.live.is_live):
            return
        chosen = []
        while not is_awaited and (run := self.live.next_run(steps_max)) is not None:
            chosen.append((run, self.live.key_of(run)))
        self._talk(now_ns)
        self._report(now_ns)
        for run, key in chosen:
            self._runs.append(run)
            if key is not None:
                self._rows.pop(key, None)
                if run.span.stop < self._layers:
                    self._rows[key] = None
            self._emit(Execute(run, key, self._pace.progress_due_ns))

    def wake_ns(self) -> int | None:
        """When a partner's answer is late, or progress is worth a report."""
        if self._runs:
            return None
        deadline_ns = self.live.deadline_ns() if self._has_partner else None
        report_ns = self._pace.progress_due_ns if self._pace.is_behind else None
        times_ns = [at_ns for at_ns in (deadline_ns, report_ns) if at_ns is not None]
        return min(times_ns, default=None)

    # -- helpers, in the order used -------------------------------------------------------------

    def _took(self, message: Handover, pull_ns: int, sent: PeerSent) -> None:
        """The batch is this worker's: its gateways and the controller learn that before any token
        of it."""
        if message.rows:
            self._rows[message.batch] = None
        self._emit(TakeOver(message, sent.content))
        self._giver_of[message.batch] = sent.peer
        self._handovers += 1
        wanted = []
        for spec, gateway in zip(message.requests, sent.gateways, strict=True):
            if gateway:
                wanted.append(spec)
                self._attempts.taken(gateway, spec, is_decoding=message.decoding)
            else:
                self.live.cancel(spec.request, spec.attempt)
        self._emit(
            Report(
                BatchTaken(
                    instance=self.duty.instance,
                    worker=self.order.holding.member,
                    target=message.batch.target,
                    requests=tuple((spec.request, spec.attempt) for spec in wanted),
                    next_layer=message.next_layer,
                    tokens=sum(len(s.prompt_ids) + len(s.generated_ids) for s in message.requests),
                    row_bytes=sent.size_bytes,
                    pull_ns=pull_ns,
                    moves=tuple(spec.moves for spec in wanted),
                )
            )
        )

    def _talk(self, now_ns: int) -> None:
        """Send peers what there is to send."""
        live = self.live
        if self._has_partner:
            for peer, message in live.take_outbox(now_ns):
                self._tell(peer, message)
            for key in [key for key in self._giver_of if not live.batches.holds(key)]:
                del self._giver_of[key]
            self._has_partner = bool(self._giver_of) or not live.is_alone
        for key in [key for key in self._rows if not live.batches.holds(key)]:
            del self._rows[key]
            self._emit(ForgetRows(key))

    def _tell(self, peer: WorkerRef, message: LiveMessage) -> None:
        if isinstance(message, Handover):
            gateways = tuple(self._attempts.gateway_of(s.request) for s in message.requests)
            size_bytes = message.rows * self._row_bytes
            self._emit(TellPeer(peer, message, gateways, size_bytes=size_bytes))
        elif isinstance(message, KvLayer) and self.live.batches.holds(message.batch):
            places = self.live.batches.kv_places(message.batch)
            size_bytes = self._kv_bytes(places)
            self._emit(TellPeer(peer, message, places=places, size_bytes=size_bytes))
        elif isinstance(message, KvLayer):
            # Everything in it was cancelled since.
            self._emit(TellPeer(peer, Gone(message.batch)))
        else:
            self._emit(TellPeer(peer, message))

    def _kv_bytes(self, places: Sequence[tuple[int, tuple[int, ...]]]) -> int:
        return self._kv_layer_bytes * sum(tokens for tokens, _ in places)

    def _report(self, now_ns: int) -> None:
        """Report the load if it changed, and is worth a message."""
        if self.order.rank != 0:
            return
        report = load_report(
            self.duty.instance,
            self.live.batcher,
            handovers=self._handovers,
            handover_bytes=self._received_bytes,
        )
        if self._pace.is_due(now_ns, report):
            self._emit(Report(report))

    def __repr__(self) -> str:
        return f"<Serving {self.live!r}>"
