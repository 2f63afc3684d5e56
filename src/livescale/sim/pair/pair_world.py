"""A live pair in virtual time: two LiveBatchers, their messages, and given times for everything.

The protocol is the production one; what it costs beside an order that both machines know at once
(`player.play`) is seen here. One batch is one request.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import msgspec

from livescale.batching.contract.live_messages import Handover, KvLayer, LiveMessage
from livescale.batching.contract.live_order import LIVE_ORDERS
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, Run, Segment, SequenceSpec
from livescale.sim.base.clock import COMMIT_PRIORITY, Action, Clock
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef
from livescale.values.units import NS_PER_S

_SOURCE, _TARGET = WorkerRef(0), WorkerRef(1)
_BLOCK_TOKENS = 1 << 22
"""A block for each request, whatever it generates: room for KV is not what is looked at here."""

_LIMITS = LiveLimits()

_SETTLE, _START = 1, 2
"""At one instant Runs end and all that comes is there first, then messages are taken in and sent;
the source starts a Run after that, and the target after the source."""


@dataclass(frozen=True, slots=True)
class PairLoad:
    """What a pair of instances of a model of `layers` decoder layers is given.

    All batches wait from 0 on: `tokens` of each, and what one of its layers takes
    (`batch_layer_ns`). Layer k of the model (embedding and head included: layers + 2 of them) is
    complete on the target at `arrived_ns[k]`, or from 0 on if that is earlier. A message takes
    `message_ns`, and rows (`row_bytes` per token) and KV (`kv_layer_bytes` per token and layer) go
    one after the other at `bytes_per_s` (None: at once). Each request gets `output_tokens`;
    `decodes` requests decode at the source all the time, and a Run of decodes takes `decode_ns`,
    however many they are. Where the target is faster or slower than the source, `target_layer_ns`
    is what a layer of each batch takes there.
    """

    order: str
    layers: int
    batch_layer_ns: tuple[int, ...]
    arrived_ns: tuple[int, ...]
    message_ns: int
    bytes_per_s: int | None
    row_bytes: int
    kv_layer_bytes: int
    tokens: tuple[int, ...]
    decodes: int = 0
    decode_ns: int = 0
    output_tokens: int = 1
    run_tokens_max: int = 2048
    limits: LiveLimits = _LIMITS
    target_layer_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in LIVE_ORDERS:
            raise ValueError(f"there is no live order '{self.order}': {', '.join(LIVE_ORDERS)}")
        if len(self.arrived_ns) != self.layers + 2:
            raise ValueError(f"{len(self.arrived_ns)} arrivals of {self.layers + 2} layers")
        if not self.tokens or len(self.batch_layer_ns) != len(self.tokens):
            raise ValueError(f"{len(self.batch_layer_ns)} times for {len(self.tokens)} batches")
        if self.target_layer_ns and len(self.target_layer_ns) != len(self.tokens):
            raise ValueError(f"{len(self.target_layer_ns)} times for {len(self.tokens)} batches")
        if (self.decodes or self.output_tokens > 1) and self.decode_ns < 1:
            raise ValueError("decodes take time: decode_ns must be at least 1")


@dataclass(frozen=True, slots=True)
class PairWork:
    """One Run: of which batches' prompts (numbers), with so many decodes, over which layers."""

    on_target: bool
    batches: tuple[int, ...]
    decodes: int
    span: LayerSpan
    start_ns: int
    stop_ns: int


@dataclass(slots=True)
class PairRun:
    """What came of it, per batch in their order. `tbt_ns` are the times between the tokens of
    the requests that decode at the source, once per Run; `handovers` counts batches that went over,
    with `moved_bytes` of rows and KV."""

    first_token_ns: list[int]
    finished_ns: list[int]
    works: list[PairWork] = field(default_factory=list)
    tbt_ns: list[int] = field(default_factory=list)
    handovers: int = 0
    moved_bytes: int = 0

    def rate(self, from_ns: int, to_ns: int) -> float:
        """Prefill work in this time, in instances: the share of it that each was in Runs with
        prompts, added up."""
        busy = sum(
            max(0, min(work.stop_ns, to_ns) - max(work.start_ns, from_ns))
            for work in self.works
            if work.batches
        )
        return busy / (to_ns - from_ns)


@dataclass(slots=True)
class _Member:
    """One of the two. What comes while it is in a Run waits until the Run is over."""

    ref: WorkerRef
    batcher: LiveBatcher
    inbox: deque[Action] = field(default_factory=deque)
    is_running: bool = False
    #: when what it sent last will be there
    sent_ns: int = 0
    deadline_ns: int | None = None


class PairWorld:
    """Both instances, what is on its way between them, and the time.

    Members, which start a Run in the same step in which they learn that one has ended, would not
    know what the other one ends at that instant: here nothing but the protocol may cost anything.
    """

    def __init__(self, load: PairLoad) -> None:
        self._load = load
        self._clock = Clock()
        self._is_live = LIVE_ORDERS[load.order].is_live
        order = load.order if self._is_live else None
        self._members = [self._member(_SOURCE, None), self._member(_TARGET, order)]
        self._left = deque(range(len(load.tokens)))
        self._link_free_ns = 0
        self._decoded_ns = 0
        count = len(load.tokens)
        self._run = PairRun([-1] * count, [-1] * count)

    def play(self) -> PairRun:
        """Until every batch has all its tokens."""
        self._begin()
        while min(self._run.finished_ns) < 0:
            if not self._clock.run_next():
                raise ValueError(f"nothing happens any more: {self._clock}, {self._members}")
        self._run.handovers = self._members[1].batcher.giver.handovers
        return self._run

    # -- helpers, in the order used -------------------------------------------------------------

    def _member(self, ref: WorkerRef, live_order: str | None) -> _Member:
        load = self._load
        requests = len(load.tokens) + load.decodes
        config = BatcherConfig(
            kv_blocks=4 * requests,
            block_tokens=_BLOCK_TOKENS,
            run_tokens_max=max(load.run_tokens_max, 4 * requests),
            sequences_max=4 * requests,
        )
        batcher = Batcher(config, LayerSpan(0, load.layers + 2))
        # One request is one batch.
        limits = msgspec.structs.replace(load.limits, batch_tokens_max=1)
        gives_to = () if live_order is None else (Partner(1, _SOURCE),)
        return _Member(ref, LiveBatcher(batcher, ref.worker + 1, limits, live_order, gives_to))

    def _begin(self) -> None:
        source, target = self._members
        source.batcher.layers_arrived(self._load.layers + 2)
        for number in range(self._load.decodes):
            sampling = SamplingParams(_BLOCK_TOKENS // 2)
            source.batcher.add(SequenceSpec(f"d{number}", 1, range(1), sampling))
        run = source.batcher.next()
        if run is not None:  # they decode already
            source.batcher.done(run, [(0,)] * len(run.segments), 0)
        arrived_ns = itertools.accumulate(self._load.arrived_ns, max, initial=0)
        for watermark, at_ns in enumerate(arrived_ns):
            self._expect(at_ns, target, partial(target.batcher.layers_arrived, watermark))
        if self._is_live:
            while self._left:
                self._add(target)
        self._look(0)

    def _expect(self, at_ns: int, member: _Member, news: Action) -> None:
        """At that time something comes in for the member."""
        self._clock.at(at_ns, partial(member.inbox.append, news))
        self._look(at_ns)

    def _look(self, at_ns: int) -> None:
        """At that time both see to what there is to do."""
        self._clock.at(at_ns, self._settle, _SETTLE)
        for member in self._members:
            self._clock.at(at_ns, partial(self._start, member), _START + member.ref.worker)

    def _add(self, member: _Member) -> None:
        number = self._left.popleft()
        sampling = SamplingParams(self._load.output_tokens)
        prompt = range(self._load.tokens[number])
        member.batcher.add(SequenceSpec(f"b{number}", 1, prompt, sampling))

    def _settle(self) -> None:
        for member in self._members:
            if not member.is_running:
                self._take_in(member)
                self._send(member)

    def _end(self, member: _Member, run: Run, work: PairWork) -> None:
        member.is_running = False
        count = sum(segment.samples for segment in run.segments)
        took_ns = work.stop_ns - work.start_ns
        for emission in member.batcher.done(run, [(0,)] * count, took_ns):
            self._emitted(emission)
        if work.decodes and not work.on_target and self._load.decodes:
            self._run.tbt_ns.append(self._clock.now_ns - self._decoded_ns)
            self._decoded_ns = self._clock.now_ns

    def _emitted(self, emission: EmittedTokens) -> None:
        if not emission.request.startswith("b"):
            return
        number = int(emission.request[1:])
        if emission.index == 0:
            self._run.first_token_ns[number] = self._clock.now_ns
        if emission.finish_reason is not None:
            self._run.finished_ns[number] = self._clock.now_ns

    def _take_in(self, member: _Member) -> None:
        batcher = member.batcher
        while member.inbox:
            member.inbox.popleft()()
        # Who does not share a line takes the next batch from a queue before both.
        is_free = batcher.is_full and not batcher.batcher.lines.queued_prefill_tokens
        if self._left and is_free:
            self._add(member)

    def _send(self, member: _Member) -> None:
        for peer, message in member.batcher.take_outbox(self._clock.now_ns):
            there_ns = self._clock.now_ns
            size = self._bytes(message)
            if size and self._load.bytes_per_s is not None:
                start_ns = max(self._clock.now_ns, self._link_free_ns)
                there_ns = start_ns + -(-size * NS_PER_S // self._load.bytes_per_s)
                self._link_free_ns = there_ns
            self._run.moved_bytes += size
            # In the order in which they were sent.
            member.sent_ns = max(there_ns + self._load.message_ns, member.sent_ns)
            receiver = self._members[peer.worker]
            news = partial(self._hear, receiver, member.ref, message)
            self._expect(member.sent_ns, receiver, news)
        deadline_ns = member.batcher.deadline_ns()
        if deadline_ns is not None and deadline_ns != member.deadline_ns:
            self._look(deadline_ns)
        member.deadline_ns = deadline_ns

    def _hear(self, member: _Member, peer: WorkerRef, message: LiveMessage) -> None:
        member.batcher.take_message(peer, message, self._clock.now_ns)

    def _bytes(self, message: LiveMessage) -> int:
        """What comes along with a message."""
        if isinstance(message, Handover):
            return message.rows * self._load.row_bytes
        if isinstance(message, KvLayer):
            # One request is one batch, and numbers count from 1 in their order.
            return self._load.tokens[message.batch.number - 1] * self._load.kv_layer_bytes
        return 0

    def _start(self, member: _Member) -> None:
        if member.is_running:
            return
        run = member.batcher.next()
        if run is not None:
            member.is_running, work = True, self._work(member, run)
            self._run.works.append(work)
            self._clock.at(work.stop_ns, partial(self._end, member, run, work), COMMIT_PRIORITY)
            self._look(work.stop_ns)
        self._send(member)

    def _work(self, member: _Member, run: Run) -> PairWork:
        load = self._load
        on_target = member.ref == _TARGET
        layer_ns = (on_target and load.target_layer_ns) or load.batch_layer_ns
        layers = run.span.decoder_layers(load.layers + 2)
        batches = []
        took_ns, decodes = 0, 0
        for segment in run.segments:
            number = self._prompt_of(segment)
            if number is None:
                decodes += 1
                continue
            batches.append(number)
            whole_ns = layers * layer_ns[number] * segment.token_count
            took_ns += -(-whole_ns // load.tokens[number])
        took_ns += load.decode_ns if decodes else 0
        stop_ns = self._clock.now_ns + took_ns
        return PairWork(on_target, tuple(batches), decodes, run.span, self._clock.now_ns, stop_ns)

    def _prompt_of(self, segment: Segment) -> int | None:
        """The batch whose prompt it belongs to; None for a decode."""
        if not segment.request.startswith("b"):
            return None
        number = int(segment.request[1:])
        return number if segment.first_position < self._load.tokens[number] else None
