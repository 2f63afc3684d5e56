"""Two instances of a model in virtual time, one of which is still loading: LiveBatchers decide,
torch executors compute, rows and KV go over as bytes. No transport, no clock.

The gateway's part is here, too, with the ledger of a real one: who may say the next token of a
request.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from livescale.batching.contract.live_messages import Handover, KvLayer, LiveMessage
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.engine.base.run_result import RunResult
from livescale.engine.executor import TorchExecutor
from livescale.member.ledger import Forget, Ledger, LedgerEffect, Send
from livescale.messages.attempts import AttemptReturned, AttemptTaken
from livescale.messages.commands import Dispatch
from livescale.messages.events import RequestEnded
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, RequestId, WorkerRef

SOURCE, TARGET = WorkerRef(0), WorkerRef(1)
TOKEN_LAYER_NS = 1_000
RUN_NS = 2_000  # of every Run, besides its tokens


@dataclass(frozen=True)
class LiveRequest:
    """Comes at `at_ns` to the target, or to the source, and may be cancelled later."""

    spec: SequenceSpec
    at_ns: int
    is_sources: bool = False
    cancel_ns: int | None = None


@dataclass(frozen=True)
class LiveScenario:
    """What happens to a pair. All layers of the target are complete at `layer_ns`.

    `kv_blocks` are the target's and the source's. At `cut_ns` the two lose each other; at `fail_ns`
    the load fails if it is not over.
    """

    order: str
    requests: tuple[LiveRequest, ...]
    layer_ns: tuple[int, ...]
    limits: LiveLimits
    run_tokens_max: int = 64
    sequences_max: int = 8
    growth_tokens: int = 0
    kv_blocks: tuple[int, int] = (100, 100)
    message_ns: int = 0
    cut_ns: int | None = None
    fail_ns: int | None = None
    seed: int = 0


@dataclass
class Transcript:
    """One request and its tokens."""

    spec: SequenceSpec
    tokens: list[int]

    @property
    def new_tokens(self) -> list[int]:
        """Without those that came with the request."""
        return self.tokens[len(self.spec.generated_ids) :]


@dataclass
class Node:
    """One worker: an instance, its executor, and the rows of live batches."""

    ref: WorkerRef
    batcher: LiveBatcher
    executor: TorchExecutor
    rows: dict[BatchKey, torch.Tensor] = field(default_factory=dict)
    #: what waits for the end of the Run in flight
    inbox: list[Callable[[], object]] = field(default_factory=list)
    in_flight: tuple[Run, RunResult] | None = None
    tick_ns: int | None = None
    is_alone: bool = False


class LivePair:
    """Plays a scenario; `transcripts` and `counts` tell what came of it."""

    def __init__(
        self, scenario: LiveScenario, source: TorchExecutor, target: TorchExecutor, layers: int
    ) -> None:
        """`source` is complete, of `target` no layer is materialized."""
        self.scenario = scenario
        self.transcripts: dict[RequestId, Transcript] = {}
        self.counts: Counter[str] = Counter()
        self._ledger = Ledger()
        self._layers = layers
        self._draw = random.Random(scenario.seed)
        self._now_ns = 0
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._arrived: set[int] = set()
        self._is_cut = self._has_failed = False
        self._nodes = {
            SOURCE: Node(SOURCE, self._batcher(1, scenario.kv_blocks[1]), source),
            TARGET: Node(TARGET, self._batcher(2, scenario.kv_blocks[0], scenario.order), target),
        }
        self._nodes[SOURCE].batcher.layers_arrived(layers)

    def play(self) -> None:
        """Until nothing happens any more. Nothing is left on the instances then."""
        scenario = self.scenario
        for request in scenario.requests:
            self._at(request.at_ns, partial(self._arrive, request))
        for layer, at_ns in enumerate(scenario.layer_ns):
            self._at(at_ns, partial(self._between, TARGET, partial(self._land, layer)))
        if scenario.cut_ns is not None:
            self._at(scenario.cut_ns, self._cut)
        if scenario.fail_ns is not None:
            self._at(scenario.fail_ns, partial(self._between, TARGET, self._fail))
        while self._events:
            self._now_ns, _, event = heapq.heappop(self._events)
            event()
            for node in self._nodes.values():
                self._pump(node)
        for node in self._nodes.values():
            assert node.batcher.batcher.pool.used == 0, f"{node.batcher!r}"
            assert not node.batcher.requests(), f"{node.batcher!r}"
            assert not node.rows, f"{node.batcher!r}: rows of {list(node.rows)}"
            assert node.batcher.taker.is_idle, f"{node.batcher!r}"
            self.counts["preemptions"] += node.batcher.batcher.room.preemptions
        assert list(self._ledger) == [], "every request ends"

    # -- events -----------------------------------------------------------------------------

    def _at(self, at_ns: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._numbers), event))

    def _between(self, ref: WorkerRef, event: Callable[[], object]) -> None:
        """Once no Run is in flight there."""
        self._nodes[ref].inbox.append(event)

    def _arrive(self, request: LiveRequest) -> None:
        spec = request.spec
        is_sources = request.is_sources or self._has_failed
        owner = SOURCE if is_sources else TARGET
        self.transcripts[spec.request] = Transcript(spec, list(spec.generated_ids))
        self._ledger.open(spec.request)
        self._dispatch(spec.request, spec.attempt, owner)
        earlier = len(spec.generated_ids)
        self._ledger.came(owner, spec.request, spec.attempt, index=0, count=earlier, is_last=False)
        if request.cancel_ns is not None:
            self._at(request.cancel_ns, partial(self._client_leaves, spec.request))

    def _client_leaves(self, request: RequestId) -> None:
        effects = self._ledger.cancel(request)
        self.counts["cancelled"] += bool(effects)
        self._carry_out(effects)

    def _forget(self, ref: WorkerRef, request: RequestId, attempt: int) -> None:
        """Cancel, or Disown: the worker is told, whatever it does just now."""
        cancel = partial(self._nodes[ref].batcher.cancel, request, attempt)
        self._at(self._now_ns + self.scenario.message_ns, cancel)

    def _land(self, layer: int) -> None:
        if not self._has_failed:
            target = self._nodes[TARGET]
            target.executor.materialize(layer)
            self._arrived.add(layer)
            prefix = itertools.takewhile(self._arrived.__contains__, range(self._layers))
            target.batcher.layers_arrived(len(list(prefix)))

    def _cut(self) -> None:
        """Nothing more is sent. What is on its way arrives until the loss is noticed."""
        self._is_cut = True
        for ref in self._nodes:
            at_ns = self._now_ns + self._draw.randrange(1, 100_000)
            self._at(at_ns, partial(self._between, ref, partial(self._lose, self._nodes[ref])))

    def _lose(self, node: Node) -> None:
        node.is_alone = True
        node.batcher.peer_lost(TARGET if node.ref == SOURCE else SOURCE)

    def _fail(self) -> None:
        """The load fails: its requests go to the source, with their next attempt."""
        target = self._nodes[TARGET]
        if target.batcher.is_full:
            return
        self._has_failed = True
        self.counts["failed"] += 1
        for request, attempt in target.batcher.give_back():
            self._carry_out(self._ledger.reported(TARGET, AttemptReturned(request, attempt)))

    # -- a worker ---------------------------------------------------------------------------

    def _batcher(self, instance: int, kv_blocks: int, live_order: str | None = None) -> LiveBatcher:
        s = self.scenario
        config = BatcherConfig(
            *(kv_blocks, 4, s.run_tokens_max, s.sequences_max), growth_tokens=s.growth_tokens
        )
        batcher = Batcher(config, LayerSpan(0, self._layers))
        gives_to = () if live_order is None else (Partner(1, SOURCE),)
        return LiveBatcher(batcher, instance, s.limits, live_order, gives_to)

    def _pump(self, node: Node) -> None:
        batcher = node.batcher
        if node.in_flight is None:
            while node.inbox:
                node.inbox.pop(0)()
                self._tell(node)
            run = None if node.ref == TARGET and self._has_failed else batcher.next()
            if run is not None:
                self._start(node, run)
        self._tell(node)
        batcher.validate()
        if node.in_flight is None:
            for key in [key for key in node.rows if not batcher.holds(key)]:
                del node.rows[key]
        deadline_ns = batcher.deadline_ns()
        if deadline_ns is not None and deadline_ns != node.tick_ns:
            node.tick_ns = deadline_ns
            self._at(max(deadline_ns, self._now_ns), lambda: None)

    def _start(self, node: Node, run: Run) -> None:
        key = run.batch
        hidden = None if key is None or run.span.start == 0 else node.rows[key]
        result = node.executor.run(run, hidden)
        if key is not None and isinstance(result.hidden, torch.Tensor):
            node.rows[key] = result.hidden
        node.in_flight = run, result
        layers = min(run.span.stop, self._layers - 1) - max(run.span.start, 1)
        took_ns = RUN_NS + layers * run.token_count * TOKEN_LAYER_NS * self._draw.randrange(1, 4)
        self._at(self._now_ns + took_ns, partial(self._end, node, took_ns))

    def _end(self, node: Node, took_ns: int) -> None:
        assert node.in_flight is not None
        run, result = node.in_flight
        node.in_flight = None
        sampled = [[token_id] for token_id in result.token_ids]
        for emission in node.batcher.done(run, sampled, took_ns):
            self._hear(node.ref, emission)
        self._tell(node)

    # -- what workers tell each other ---------------------------------------------------------

    def _tell(self, node: Node) -> None:
        for peer, message in node.batcher.take_outbox(self._now_ns):
            content = self._content(node, message)
            if isinstance(message, Handover):
                self.counts[f"handover at {message.next_layer}"] += 1
            if not self._is_cut:
                arrive = partial(self._receive, self._nodes[peer], node.ref, message, content)
                at_ns = self._now_ns + self.scenario.message_ns
                self._at(at_ns, partial(self._between, peer, arrive))

    def _content(self, node: Node, message: LiveMessage) -> memoryview | None:
        """The bytes that go with a message."""
        if isinstance(message, Handover) and message.rows:
            return node.executor.export_rows(node.rows[message.batch])
        if isinstance(message, KvLayer):
            parts = [
                node.executor.export_kv(message.layer - 1, table, tokens)
                for tokens, table in node.batcher.kv_places(message.batch)
            ]
            return memoryview(bytearray(b"".join(parts)))
        return None

    def _receive(
        self, node: Node, peer: WorkerRef, message: LiveMessage, content: memoryview | None
    ) -> None:
        if node.is_alone:
            return
        if isinstance(message, Handover) and content is not None:
            node.rows[message.batch] = node.executor.import_rows(content, message.rows)
        if isinstance(message, KvLayer) and message.batch in node.batcher.batches.taken:
            assert content is not None
            self._import(node, message, content)
        pull_ns = node.batcher.take_message(peer, message, self._now_ns)
        if pull_ns is not None:
            assert isinstance(message, Handover)
            self.counts["batches taken"] += 1
            for spec in message.requests:
                report = AttemptTaken(spec.request, spec.attempt, spec.moves)
                self._carry_out(self._ledger.reported(node.ref, report))

    def _import(self, node: Node, message: KvLayer, content: memoryview) -> None:
        start = 0
        for tokens, table in node.batcher.kv_places(message.batch):
            stop = start + node.executor.kv_layer_bytes(tokens)
            if table:
                node.executor.import_kv(message.layer - 1, table, tokens, content[start:stop])
            start = stop
        assert start == content.nbytes
        self.counts["KV layers"] += 1

    # -- the gateway --------------------------------------------------------------------------

    def _dispatch(self, request: RequestId, attempt: int, ref: WorkerRef) -> None:
        order = Dispatch(request, attempt, 0, ref)
        self._carry_out(self._ledger.dispatched(order, is_reachable=True))

    def _hear(self, ref: WorkerRef, emission: EmittedTokens) -> None:
        request, attempt, index = emission.request, emission.attempt, emission.index
        entry, tokens = self._ledger.get(request), self.transcripts[request].tokens
        if entry is not None and entry.is_run_by(ref, attempt):
            assert index <= len(tokens), f"a gap before {emission}"
            # What the last owner had sent already is the same.
            (token_id,) = emission.token_ids
            assert (*tokens, token_id)[index] == token_id, f"{emission}"
        accepted, effects = self._ledger.came(
            ref,
            request,
            attempt,
            index=index,
            count=1,
            is_last=emission.finish_reason is not None,
        )
        if accepted:
            tokens.extend(emission.token_ids)
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[LedgerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._submit(effect.order)
            elif isinstance(effect, Forget):
                self._forget(effect.worker, effect.message.request, effect.message.attempt)
            elif isinstance(effect, RequestEnded):
                # The load failed: the next attempt is the source's.
                self._dispatch(effect.request, effect.attempt + 1, SOURCE)

    def _submit(self, order: Dispatch) -> None:
        text = self.transcripts[order.request]
        spec = replace(text.spec, attempt=order.attempt, generated_ids=tuple(text.tokens))
        self._nodes[order.worker].batcher.add(spec)
