"""Workers as Members with shells that write numbers where real ones write bytes.

A player decides what happens when: orders, layers, requests, messages between workers that are late
or lost, and what of it a worker takes in with one step. A witness looks at every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving_witness import ServingWitness, token_of

from livescale.batching.contract.live_messages import Handover
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.common.regions import ALIGNMENT_BYTES
from livescale.member.effects import (
    Answer,
    Assign,
    DropFetch,
    Effect,
    Execute,
    Fetch,
    ForgetRows,
    Materialize,
    Measure,
    Release,
    Report,
    TakeOver,
    TakeUp,
    TellPeer,
    WriteKv,
)
from livescale.member.inputs import (
    AllCame,
    ExecutorReady,
    FetchFailed,
    FirstByteCame,
    GatewayUnknown,
    LayerCame,
    LayersRan,
    MemberInput,
    Ordered,
    PeerLost,
    PeerSent,
    RankLayers,
    RateMeasured,
    RunEnded,
)
from livescale.member.instance import ServingLimits
from livescale.member.member import Member
from livescale.messages.attempts import AttemptTaken
from livescale.messages.commands import StartHolding
from livescale.sim.checkers.live import live_batcher_of
from livescale.values.routes import Duty
from livescale.values.types import PlanId, SamplingParams, WorkerRef

LAYER_BYTES = (600, 500, 500, 500, 700)
MEMORY_BYTES = ALIGNMENT_BYTES + sum(LAYER_BYTES) + 1500
"""Room for two models, the second one from the second page on, and for first layers."""
KV_LAYER_BYTES, ROW_BYTES = 3, 5
BATCHER = BatcherConfig(
    kv_blocks=12, block_tokens=2, run_tokens_max=8, sequences_max=4, growth_tokens=2
)
LIVE = LiveLimits(
    batches_max=3,
    batch_tokens_max=8,
    span_ns=40,
    gap_ns=60,
    kv_layers_ahead=2,
    answer_ns=3000,
    move_factor=1,
)


@dataclass
class Transfer:
    """Layers of a holding that are still to come; `has_begun`: some byte has."""

    missing: list[int]
    has_begun: bool = False


class Shell:
    """Carries out what one life of a worker asks for."""

    def __init__(self, ref: WorkerRef, world: World) -> None:
        self.ref = ref
        self._world = world
        limits = ServingLimits("cpu", LIVE, resident_bytes=1500, report_gap_ns=200)
        self.member = Member(ref, MEMORY_BYTES, limits)
        self.witness = ServingWitness(self.member, MEMORY_BYTES)
        self.twin = Member(ref, MEMORY_BYTES, limits)
        self.inbox: deque[MemberInput] = deque()
        #: what its own executor has reported: absorbed before the inbox
        self._own: list[MemberInput] = []
        self.runs: deque[Execute] = deque()
        #: decoder layers of the first Run in flight that the Member was told of
        self._layers_told = 0
        self.transfers: dict[PlanId, Transfer] = {}
        self.disconnected: set[str] = set()
        self._assigned: PlanId | None = None
        self.materialized: set[int] = set()
        self._rows: dict[BatchKey, int] = {}
        self._contents: dict[int, int] = {}
        self._carry: dict[type, Callable[[Any], None]] = {
            Report: lambda effect: world.reported(self, effect.event),
            Answer: self._answer,
            TellPeer: self._tell,
            Fetch: self._fetch,
            TakeUp: self._take_up,
            Release: self._release,
            DropFetch: self._drop,
            Assign: self._assign,
            Materialize: self._materialize,
            Measure: lambda effect: self._own.append(RateMeasured(effect.plan, 77)),
            Execute: self._execute,
            TakeOver: self._take_over,
            WriteKv: self._write_kv,
            ForgetRows: lambda effect: self._rows.pop(effect.batch, None),
        }

    @property
    def order(self) -> StartHolding | None:
        """That of the model which is here or on its way, and no warm spare."""
        holdings = (holding for holding in self.member.holdings if not holding.is_spare)
        return next((holding.order for holding in holdings), None)

    @property
    def duty(self) -> Duty | None:
        """What it does with that model."""
        return self.order.duty if self.order is not None else None

    def step(self, count: int, steps_max: int = 1) -> None:
        """Take in so many inputs of the inbox, after the end of the first Run in flight, or of a
        layer of it."""
        if self.runs:
            self._go_on_with_run()
        taken: list[MemberInput] = []
        # Inputs behind an order to load wait in the Member for the executor: here in the inbox,
        # so that the witness sees them when the Member absorbs them.
        while self.inbox and len(taken) < count and not _is_load(taken[-1:]):
            taken.append(self.inbox.popleft())
        inputs, self._own = self._own + taken, []
        # What waits for the end of a Run in flight, or for the executor, is seen when the Member
        # absorbs it, and news of that Run or executor are absorbed before.
        awaited = RunEnded | LayersRan | ExecutorReady
        first = [one for one in inputs if isinstance(one, awaited)]
        later = [one for one in inputs if not isinstance(one, awaited)]
        news = [*first, *self.member.waiting, *later]
        self._contents = {n.content: n.size_bytes for n in news if isinstance(n, PeerSent)}
        now_ns = self._world.now_ns
        effects = self.member.step(now_ns, inputs, steps_max)
        assert self.twin.step(now_ns, inputs, steps_max) == effects, "not the same twice"
        self._world.record(self.ref, now_ns, inputs, effects, steps_max)
        self.witness.absorb(news[: len(news) - len(self.member.waiting)])
        for effect in effects:
            self.witness.watch(effect)
            carry = self._carry.get(type(effect))
            if carry is not None:
                carry(effect)
        self.witness.check(self.member.reports)
        self.witness.check_serving()
        if self.member.instance is not None:
            live_batcher_of(self.member.instance).validate()
        wake_ns = self.member.wake_ns()
        assert wake_ns is None or wake_ns > now_ns, "it would be woken for ever"
        assert wake_ns is None or not self.runs

    @property
    def is_busy(self) -> bool:
        """A step would do something now."""
        return bool(self._own or self.inbox or self.runs)

    def check_rest(self) -> None:
        """Nothing is left of any instance."""
        assert self.member.holdings == self.member.reports == ()
        assert not self.witness.stays
        assert not self._rows, self._rows
        assert self.member.wake_ns() is None

    # -- inputs -----------------------------------------------------------------------------------

    def _go_on_with_run(self) -> None:
        if self.runs[0].tells_layers and self._layers_told < len(LAYER_BYTES) - 3:
            self._layers_told += 1
            self._own.append(LayersRan(self._layers_told + 1))
            self._world.layers += 1
        else:
            self._end_run()

    def _end_run(self) -> None:
        self._layers_told = 0
        run = self.runs.popleft().run
        tokens = []
        for segment in run.segments:
            if segment.samples:
                index = segment.context_tokens - len(segment.prompt_ids)
                tokens.append([token_of(segment.request, index + i) for i in range(run.steps)])
        self._own.append(RunEnded(tokens, 20))

    def bring_layer(self, place: int) -> None:
        """One more layer of the model arrives."""
        for plan, transfer in self.transfers.items():
            if not transfer.has_begun:
                transfer.has_begun = True
                self.inbox.append(FirstByteCame(plan))
            if transfer.missing:
                layer = transfer.missing.pop(place % len(transfer.missing))
                self.inbox.append(LayerCame(plan, layer))
                if not transfer.missing:
                    self.inbox.append(AllCame(plan, 1000 + plan))

    # -- effects ----------------------------------------------------------------------------------

    def _answer(self, effect: Answer) -> None:
        answer = effect.answer
        if isinstance(answer, AttemptTaken) and effect.gateway in self.disconnected:
            unknown = GatewayUnknown(effect.gateway, answer.request, answer.attempt)
            self.inbox.append(unknown)

    def _tell(self, effect: TellPeer) -> None:
        if isinstance(effect.message, Handover) and effect.message.rows:
            assert self._rows[effect.message.batch] * ROW_BYTES == effect.size_bytes
        self._world.send(self.ref, effect)

    def _fetch(self, effect: Fetch) -> None:
        transfer = self.transfers[effect.plan] = Transfer(list(range(len(LAYER_BYTES))))
        for layer in range(effect.resident.layers if effect.resident is not None else 0):
            transfer.missing.remove(layer)
            self.inbox.append(LayerCame(effect.plan, layer))

    def _take_up(self, effect: TakeUp) -> None:
        assert effect.order.spare == effect.spare
        self.transfers[effect.plan] = self.transfers.pop(effect.spare)
        assert not self.transfers[effect.plan].missing, "a warm spare has everything"

    def _drop(self, effect: DropFetch) -> None:
        self.transfers.pop(effect.plan, None)
        self._release(effect)

    def _release(self, effect: DropFetch | Release) -> None:
        if effect.plan != self._assigned:
            return  # another model's spare
        self._assigned = None
        self.materialized = set()
        assert not self._rows, "rows of an instance that is gone"
        assert not self.runs, "a Run is in flight"

    def _assign(self, effect: Assign) -> None:
        assert self._assigned is None, "the executor has a model"
        if effect.plan in self._world.refused:
            self._own.append(FetchFailed(effect.plan, "no such model"))
            return
        self._assigned = effect.plan
        self._own.append(ExecutorReady(effect.plan, BATCHER, KV_LAYER_BYTES, ROW_BYTES))

    def _materialize(self, effect: Materialize) -> None:
        assert self._assigned is not None
        self.materialized.add(effect.layer)

    def _execute(self, effect: Execute) -> None:
        """It is carried out behind those in flight, and what is asked for later behind it."""
        run = effect.run
        self.runs.append(effect)
        self._world.ahead += len(self.runs) > 1
        rows = self._rows.pop(run.batch, None) if run.batch is not None else None
        if run.span.start:
            assert rows == run.token_count, f"{run.batch} has rows {rows}"
        if run.batch is not None and run.span.stop < len(LAYER_BYTES):
            self._rows[run.batch] = run.token_count
        self._world.check_ranks(self, run.span.stop)

    def _take_over(self, effect: TakeOver) -> None:
        message = effect.message
        assert self._contents[effect.content] == message.rows * ROW_BYTES
        if message.rows:
            self._rows[message.batch] = message.rows

    def _write_kv(self, effect: WriteKv) -> None:
        size_bytes = KV_LAYER_BYTES * sum(tokens for tokens, _ in effect.places)
        assert self._contents[effect.content] == size_bytes
        blocks = [block for _, table in effect.places for block in table]
        assert len(blocks) == len(set(blocks)), "a block is written twice"


class World:
    """All workers, the ways between them, and what is recorded of each."""

    def __init__(self, workers: int) -> None:
        self.now_ns = 0
        #: Runs that were asked for before the last one ended
        self.ahead = 0
        #: layers that Members were told of while a Run went on
        self.layers = 0
        self._contents = 0
        self.ways: dict[tuple[WorkerRef, WorkerRef], deque[TellPeer]] = {}
        self.shells = [Shell(WorkerRef(number), self) for number in range(workers)]
        self.events: list[tuple[WorkerRef, object]] = []
        #: plans whose model no executor takes
        self.refused: set[PlanId] = set()
        self.records: dict[WorkerRef, list[tuple]] = {}

    # -- for shells -------------------------------------------------------------------------------

    def reported(self, shell: Shell, event: object) -> None:
        self.events.append((shell.ref, event))

    def record(
        self,
        ref: WorkerRef,
        now_ns: int,
        inputs: list[MemberInput],
        effects: list[Effect],
        steps_max: int,
    ) -> None:
        self.records.setdefault(ref, []).append((now_ns, inputs, steps_max, effects))

    def send(self, sender: WorkerRef, effect: TellPeer) -> None:
        """On the way to an earlier life of a worker nothing arrives, which is noticed."""
        if self.shell_of(effect.peer) is not None:
            self.ways.setdefault((sender, effect.peer), deque()).append(effect)
            return
        shell = self.shell_of(sender)
        assert shell is not None
        shell.inbox.append(PeerLost(effect.peer))

    def check_ranks(self, shell: Shell, stop: int) -> None:
        """All ranks of the instance have the layers that run."""
        duty = shell.duty
        assert duty is not None
        for other in self.shells:
            if other is not shell and other.ref in duty.workers and other.duty is not None:
                is_same = other.duty.instance == duty.instance
                has_all = other.materialized >= {*range(stop)}
                assert not is_same or has_all, "a rank lacks layers"

    # -- for the player ---------------------------------------------------------------------------

    def shell_of(self, ref: WorkerRef) -> Shell | None:
        return next((shell for shell in self.shells if shell.ref == ref), None)

    def open_ways(self) -> list[tuple[WorkerRef, WorkerRef]]:
        """Ways on which messages are, the oldest way first."""
        return [way for way, messages in self.ways.items() if messages]

    def deliver(self, way: tuple[WorkerRef, WorkerRef], *, is_refused: bool = False) -> None:
        """The first message on this way arrives. `is_refused`: as what is no message."""
        effect = self.ways[way].popleft()
        receiver = self.shell_of(way[1])
        if receiver is None:
            return
        if is_refused and not isinstance(effect.message, RankLayers):
            receiver.inbox.append(PeerLost(way[0], is_refused=True))
            return
        self._contents += 1
        sent = PeerSent(way[0], effect.message, effect.gateways, effect.size_bytes, self._contents)
        receiver.inbox.append(sent)

    def cut(self, first: WorkerRef, second: WorkerRef) -> None:
        """What is on the ways between the two is lost, but not between ranks."""
        for way in ((first, second), (second, first)):
            kept = [e for e in self.ways.get(way, ()) if isinstance(e.message, RankLayers)]
            self.ways[way] = deque(kept)
            receiver = self.shell_of(way[1])
            if receiver is not None:
                receiver.inbox.append(PeerLost(way[0]))

    def die(self, number: int) -> None:
        """The worker's process is gone, and a new one comes up."""
        old = self.shells[number].ref
        self.shells[number] = Shell(WorkerRef(old.worker, old.incarnation + 1), self)
        for shell in self.shells:
            if shell.ref.worker != number:
                # What it said last may be here or lost.
                self.ways.pop((old, shell.ref), None)
                self.ways.pop((shell.ref, old), None)
                shell.inbox.append(PeerLost(old))


def spec_of(number: int, attempt: int, tokens: int, outputs: int, known: int) -> SequenceSpec:
    """An attempt at request r`number`, of which `known` tokens were generated."""
    request = f"r{number}"
    prompt = tuple(1000 * number - 1 - place for place in reversed(range(tokens)))
    generated = tuple(token_of(request, index) for index in range(known))
    return SequenceSpec(request, attempt, prompt, SamplingParams(outputs), generated)


def _is_load(last: list[MemberInput]) -> bool:
    return any(isinstance(n, Ordered) and isinstance(n.command, StartHolding) for n in last)
