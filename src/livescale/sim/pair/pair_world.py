"""A live pair in virtual time: two LiveBatchers, their messages, and given times for everything.

The protocol is the production one; what it costs beside an order that both machines know at once
(`live_player.play`) is seen here. One batch is one request.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import msgspec

from livescale.batching.batcher import Batcher, BatcherConfig
from livescale.batching.live_batch import LiveLimits
from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.live_messages import Handover, KvLayer, LiveMessage
from livescale.batching.live_order import LIVE_ORDERS
from livescale.batching.run import Emission, Run, Segment, SequenceSpec
from livescale.plans import Pairing
from livescale.types import LayerSpan, SamplingParams, WorkerRef

_NS_PER_S = 1_000_000_000
_SOURCE, _TARGET = WorkerRef(0), WorkerRef(1)
_BLOCK_TOKENS = 1 << 22
"""A block for each request, whatever it generates: room for KV is not what is looked at here."""

_LIMITS = LiveLimits()


@dataclass(frozen=True, slots=True)
class PairLoad:
    """What a pair of instances of a model of `layers` decoder layers is given.

    All batches wait from 0 on: `tokens` of each, and what one of its layers takes
    (`batch_layer_ns`). Layer k of the model (embedding and head included: layers + 2 of them) is
    complete on the target at `arrived_ns[k]`. A message takes `message_ns`, and rows (`row_bytes`
    per token) and KV (`kv_layer_bytes` per token and layer) go one after the other at
    `bytes_per_s` (None: at once). Each request gets `output_tokens`; `decodes` requests decode at
    the source all the time, and a Run of decodes takes `decode_ns`, however many they are. A head
    takes `head_ns`. Where the target is faster or slower than the source, `target_layer_ns` is what
    a layer of each batch takes there.
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
    head_ns: int = 0
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

    @property
    def first_help_ns(self) -> int | None:
        """When the target began its first Run; None if it never did."""
        return next((work.start_ns for work in self.works if work.on_target), None)

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
    inbox: deque[tuple[WorkerRef, LiveMessage]] = field(default_factory=deque)
    watermark: int = 0
    run: Run | None = None
    work: PairWork | None = None
    #: when what it sent last will be there
    sent_ns: int = 0
    deadline_ns: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    """Something that comes: a layer (`watermark`), a message (`peer`, `message`), or only the end
    of a Run or of somebody's patience."""

    at_ns: int
    number: int
    member: int = field(compare=False)
    watermark: int = field(compare=False, default=0)
    peer: WorkerRef | None = field(compare=False, default=None)
    message: LiveMessage | None = field(compare=False, default=None)


class PairWorld:
    """Both instances, what is on its way between them, and the time."""

    def __init__(self, load: PairLoad) -> None:
        self._load = load
        self._now_ns = 0
        self._events: list[_Event] = []
        self._numbers = 0
        self._is_live = LIVE_ORDERS[load.order].is_live
        pairing = Pairing(load.order, _SOURCE, 1) if self._is_live else None
        self._members = [self._member(_SOURCE, None), self._member(_TARGET, pairing)]
        self._left = deque(range(len(load.tokens)))
        self._link_free_ns = 0
        self._decoded_ns = 0
        count = len(load.tokens)
        self._run = PairRun([-1] * count, [-1] * count)

    def play(self) -> PairRun:
        """Until every batch has all its tokens."""
        self._begin()
        while min(self._run.finished_ns) < 0:
            if not self._events:
                raise ValueError(f"nothing happens any more at {self._now_ns} ns: {self._members}")
            self._now_ns = self._events[0].at_ns
            self._settle()
            for member in self._members:
                self._start(member)
                # What one says when it begins is known before the other does.
                self._settle()
        self._run.handovers = self._members[1].batcher.giver.handovers
        return self._run

    # -- helpers, in the order used -------------------------------------------------------------

    def _member(self, ref: WorkerRef, pairing: Pairing | None) -> _Member:
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
        return _Member(ref, LiveBatcher(batcher, ref.worker + 1, limits, pairing))

    def _begin(self) -> None:
        source, target = self._members
        source.watermark = self._load.layers + 2
        source.batcher.layers_arrived(source.watermark)
        for number in range(self._load.decodes):
            sampling = SamplingParams(_BLOCK_TOKENS // 2)
            source.batcher.add(SequenceSpec(f"d{number}", 1, range(1), sampling))
        run = source.batcher.next_run()
        if run is not None:  # they decode already
            source.batcher.commit(run, [0] * len(run.segments))
        watermark_ns = 0
        for layer, arrived_ns in enumerate(self._load.arrived_ns):
            watermark_ns = max(watermark_ns, arrived_ns)
            self._expect(watermark_ns, target, watermark=layer + 1)
        if self._is_live:
            while self._left:
                self._add(target)
        self._expect(0, source)

    def _expect(
        self,
        at_ns: int,
        member: _Member,
        watermark: int = 0,
        peer: WorkerRef | None = None,
        message: LiveMessage | None = None,
    ) -> None:
        self._numbers += 1
        number = member.ref.worker
        event = _Event(at_ns, self._numbers, number, watermark, peer, message)
        heapq.heappush(self._events, event)

    def _add(self, member: _Member) -> None:
        number = self._left.popleft()
        sampling = SamplingParams(self._load.output_tokens)
        prompt = range(self._load.tokens[number])
        member.batcher.add(SequenceSpec(f"b{number}", 1, prompt, sampling))

    def _settle(self) -> None:
        """Everything that happens by now, and all that follows from it at once."""
        while self._events and self._events[0].at_ns <= self._now_ns:
            while self._events and self._events[0].at_ns <= self._now_ns:
                event = heapq.heappop(self._events)
                member = self._members[event.member]
                member.watermark = max(member.watermark, event.watermark)
                if event.peer is not None and event.message is not None:
                    member.inbox.append((event.peer, event.message))
            for member in self._members:
                self._end(member)
                if member.run is None:
                    self._take_in(member)
                    self._send(member)

    def _end(self, member: _Member) -> None:
        run, work = member.run, member.work
        if run is None or work is None or work.stop_ns > self._now_ns:
            return
        member.run = member.work = None
        count = sum(segment.samples for segment in run.segments)
        for emission in member.batcher.commit(run, [0] * count):
            self._emitted(emission)
        if work.decodes and not work.on_target and self._load.decodes:
            self._run.tbt_ns.append(self._now_ns - self._decoded_ns)
            self._decoded_ns = self._now_ns
        member.batcher.ran(run, work.stop_ns - work.start_ns)

    def _emitted(self, emission: Emission) -> None:
        if not emission.request.startswith("b"):
            return
        number = int(emission.request[1:])
        if emission.index == 0:
            self._run.first_token_ns[number] = self._now_ns
        if emission.finish_reason is not None:
            self._run.finished_ns[number] = self._now_ns

    def _take_in(self, member: _Member) -> None:
        batcher = member.batcher
        if batcher.watermark < member.watermark:
            batcher.layers_arrived(member.watermark)
        while member.inbox:
            batcher.take_message(*member.inbox.popleft(), self._now_ns)
        # Who does not share a line takes the next batch from a queue before both.
        is_free = batcher.is_full and not batcher.batcher.lines.queued_prefill_tokens
        if self._left and is_free:
            self._add(member)

    def _send(self, member: _Member) -> None:
        for peer, message in member.batcher.take_outbox(self._now_ns):
            there_ns = self._now_ns
            size = self._bytes(message)
            if size and self._load.bytes_per_s is not None:
                start_ns = max(self._now_ns, self._link_free_ns)
                there_ns = start_ns + -(-size * _NS_PER_S // self._load.bytes_per_s)
                self._link_free_ns = there_ns
            self._run.moved_bytes += size
            # In the order in which they were sent.
            member.sent_ns = max(there_ns + self._load.message_ns, member.sent_ns)
            receiver = self._members[peer.worker]
            self._expect(member.sent_ns, receiver, peer=member.ref, message=message)
        deadline_ns = member.batcher.deadline_ns()
        if deadline_ns is not None and deadline_ns != member.deadline_ns:
            self._expect(deadline_ns, member)
        member.deadline_ns = deadline_ns

    def _bytes(self, message: LiveMessage) -> int:
        """What comes along with a message."""
        if isinstance(message, Handover):
            return message.rows * self._load.row_bytes
        if isinstance(message, KvLayer):
            # One request is one batch, and numbers count from 1 in their order.
            return self._load.tokens[message.batch.number - 1] * self._load.kv_layer_bytes
        return 0

    def _start(self, member: _Member) -> None:
        if member.run is not None:
            return
        run = member.batcher.next_run()
        if run is not None:
            member.run, member.work = run, self._work(member, run)
            self._run.works.append(member.work)
            self._expect(member.work.stop_ns, member)
        self._send(member)

    def _work(self, member: _Member, run: Run) -> PairWork:
        load = self._load
        on_target = member.ref == _TARGET
        layer_ns = (on_target and load.target_layer_ns) or load.batch_layer_ns
        layers = min(run.span.stop, load.layers + 1) - max(run.span.start, 1)
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
            took_ns += load.head_ns if segment.samples else 0
        took_ns += load.decode_ns if decodes else 0
        stop_ns = self._now_ns + took_ns
        return PairWork(on_target, tuple(batches), decodes, run.span, self._now_ns, stop_ns)

    def _prompt_of(self, segment: Segment) -> int | None:
        """The batch whose prompt it belongs to; None for a decode."""
        if not segment.request.startswith("b"):
            return None
        number = int(segment.request[1:])
        return number if segment.first_position < self._load.tokens[number] else None
