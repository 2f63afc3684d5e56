"""A world of live instances in virtual time: workers, links with delays, a gateway with the ledger
of a real one, and executors that write symbols where real ones write numbers.

Everything that can happen to a live pair can be put into it; it checks each step of each node.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from kv_double import reference
from live_parts import Node, Payload, SymbolicExecutor, Target, Transcript

from livescale.batching.contract.live_messages import (
    Handover,
    KvLayer,
    LiveMessage,
    Taken,
    refusal,
)
from livescale.batching.contract.visit_messages import Visit
from livescale.batching.lines.team_batcher import TeamBatcher
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, Run, SequenceSpec
from livescale.member.ledger import Finish, Forget, Ledger, LedgerEffect, Send
from livescale.messages.attempts import AttemptReturned, AttemptTaken
from livescale.messages.commands import Dispatch
from livescale.messages.events import RequestEnded
from livescale.values.routes import Partner
from livescale.values.types import LayerSpan, Outcome, RequestId, SamplingParams, WorkerRef

SOURCE = WorkerRef(0)


class LiveWorld:
    """A source (worker 0, instance 1), targets (workers 1…, instances 2…), and after these helpers:
    further sources, which every target that has a source may be pulled from by, too."""

    def __init__(
        self,
        layers: int,
        source: BatcherConfig,
        targets: Sequence[Target],
        limits: LiveLimits,
        *,
        delays: Sequence[int] = (0,),
        gateway_ns: int = 0,
        token_layer_ns: int = 10,
        run_ns: int = 0,
        helpers: Sequence[BatcherConfig] = (),
        knows_rate: bool = False,
    ) -> None:
        self.layers = layers
        self.now_ns = 0
        self.gateway_ns = gateway_ns
        self.token_layer_ns, self.run_ns = token_layer_ns, run_ns
        self.transcripts: dict[RequestId, Transcript] = {}
        self._ledger = Ledger()
        self._salts: dict[RequestId, str] = {}
        self._states: dict[tuple[RequestId, int], list[int]] = {}
        self._delays = itertools.cycle(delays)
        self._last_arrival: dict[tuple[WorkerRef, WorkerRef], int] = {}
        self._cut: set[frozenset[WorkerRef]] = set()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.nodes: dict[WorkerRef, Node] = {}
        #: batches that a node heard to be taken, with the requests and attempts in it
        self._gone_from: dict[tuple[WorkerRef, RequestId, int], None] = {}
        #: what a node has forgotten on demand
        self._forgotten: dict[tuple[WorkerRef, RequestId, int], None] = {}
        self.is_strict = False
        #: is shown every Run that ends
        self.watch: Callable[[Node, Run], None] = lambda node, run: None
        #: is shown every message, with sender and receiver, when it is sent
        self.listen: Callable[[WorkerRef, WorkerRef, LiveMessage], None] = lambda *_: None
        self.handovers = self.messages = self.moved = self.ahead = 0
        self._add_source(SOURCE, source, limits)
        self.sources = [SOURCE]
        for number, target in enumerate(targets, 1):
            ref = WorkerRef(number)
            gives_to = [Partner(1, SOURCE)] if target.has_source else []
            batcher = Batcher(target.config, LayerSpan(0, layers + 2))
            live = LiveBatcher(batcher, number + 1, limits, target.order, gives_to)
            self._add_node(ref, live)
            for index, at_ns in enumerate(target.layer_ns):
                self.at(at_ns, lambda ref=ref, w=index + 1: self._layer_arrived(ref, w))
        for number, config in enumerate(helpers, len(targets) + 1):
            helper = WorkerRef(number)
            self._add_source(helper, config, limits)
            self.sources.append(helper)
            for index, target in enumerate(targets, 1):
                if target.has_source:
                    self._live(WorkerRef(index)).giver.pair(Partner(number + 1, helper))
        for ref in self.sources if knows_rate else ():
            # As after a prompt that is long enough to be measured.
            self._live(ref).pace.token_layer_ps = token_layer_ns * 1000

    # -- what a test does -----------------------------------------------------------------------

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_ns, next(self._count), action))

    def request(
        self,
        request: RequestId,
        ref: WorkerRef,
        prompt_ids: Sequence[int],
        outputs: int,
        salt: str = "",
        stop_ids: tuple[int, ...] = (),
        logprobs: int | None = None,
        embeds: bool = False,
    ) -> None:
        """A new request is dispatched to this worker now."""
        sampling = SamplingParams(outputs, stop_ids, logprobs=logprobs, embeds=embeds)
        self.transcripts[request] = Transcript(tuple(prompt_ids), sampling, salt)
        self._salts[request] = salt
        self._ledger.open(request)
        self.dispatch(request, ref)

    def dispatch(self, request: RequestId, ref: WorkerRef) -> None:
        """A further attempt of the request, at this worker."""
        entry = self._ledger.get(request)
        if entry is None:
            return
        if not self._can_serve(ref):
            ref = next((r for r in self.nodes if self._can_serve(r)), ref)
        if self._can_serve(ref):
            order = Dispatch(request, entry.attempt + 1, 0, ref)
            self._carry_out(self._ledger.dispatched(order, is_reachable=True))
        else:
            self._carry_out(self._ledger.failed(request, "no worker is left"))

    def cancel(self, request: RequestId) -> None:
        """The client goes away."""
        self._carry_out(self._ledger.cancel(request))

    def disown(self, request: RequestId) -> None:
        """The request is moved: the next attempt goes to another worker."""
        entry = self._ledger.get(request)
        if entry is not None and entry.owner is not None:
            refs = [*self.nodes]
            self.dispatch(request, refs[(refs.index(entry.owner) + 1) % len(refs)])

    def lose(self, ref: WorkerRef) -> None:
        """The worker dies."""
        node = self.nodes[ref]
        if not node.is_alive:
            return
        node.is_alive = False
        node.serving = node.run = node.ahead = None
        for other in self.nodes.values():
            self._between_runs(other, lambda other=other: self._peer_lost(other, ref))
        # Behind what it said.
        self._tell(ref, lambda: self._carry_out(self._ledger.worker_gone(ref)))

    def cut(self, first: WorkerRef, second: WorkerRef) -> None:
        """The link between two workers breaks for good; what is on it is lost."""
        self._cut.add(frozenset((first, second)))
        for ref, peer in ((first, second), (second, first)):
            node = self.nodes[ref]
            self._between_runs(node, lambda node=node, peer=peer: self._peer_lost(node, peer))

    def refuse(self, ref: WorkerRef, peer: WorkerRef) -> None:
        """A message of the peer was refused: the worker gives it up, and still reaches it."""
        node = self.nodes[ref]

        def give_up() -> None:
            if node.serving is not None and self.nodes[peer].is_alive:
                node.serving.peer_lost(peer, is_reachable=True)

        self._between_runs(node, give_up)

    def fail_load(self, ref: WorkerRef) -> None:
        """The instance is given up; what it had waits again."""
        self._between_runs(self.nodes[ref], lambda: self._give_back(self.nodes[ref]))

    def play(self, events_max: int = 20_000) -> None:
        """Let everything happen."""
        self._pump()
        for _ in range(events_max):
            if not self._heap:
                return
            self.play_one()
            if self.is_strict:
                self._check_source_is_busy()
        raise AssertionError(f"no end: {self.nodes}")

    def play_one(self) -> None:
        """Let the next event happen, and what follows from it."""
        self._pump()
        self.now_ns, _, action = heapq.heappop(self._heap)
        action()
        self._pump()

    # -- what must hold in the end --------------------------------------------------------------

    def check_end(self) -> None:
        """Every request has its tokens, and nothing is left anywhere."""
        assert list(self._ledger) == [], self.nodes
        for request, transcript in self.transcripts.items():
            expected = reference(
                SequenceSpec(request, 1, transcript.prompt_ids, transcript.sampling)
            )
            got = transcript.tokens
            if transcript.is_cancelled:
                assert got == expected[: len(got)], (request, got)
            else:
                assert got == expected, (request, transcript, self.nodes)
        for node in self.nodes.values():
            live = node.live
            if live is None:
                continue
            assert live.batcher.pool.used == 0, live
            assert len(live.batcher.held) == 0, live
            assert not live.batcher.has_work, live
            assert not live.batches.line, live
            assert not live.batches.taken, live
            assert live.requests() == [], live
            assert node.serving is not None
            assert node.serving.side.lead is None, live
            assert node.serving.side.is_idle, live
            assert node.serving.deadline_ns() is None, live
            assert not live.batches.given, live
            assert not live.batches.early, live
            assert live.taker.is_idle, live
            assert live.deadline_ns() is None, live
            assert not node.executor.rows, node.executor.rows
            assert live.giver.is_parted or not live.is_full, live

    # -- the gateway ----------------------------------------------------------------------------

    def _token(self, ref: WorkerRef, emission: EmittedTokens) -> None:
        request, attempt, index = emission.request, emission.attempt, emission.index
        entry = self._ledger.get(request)
        if entry is not None and entry.is_run_by(ref, attempt):
            assert index <= entry.tokens, f"a gap before {emission}"
        accepted, effects = self._ledger.came(
            ref,
            request,
            attempt,
            index=index,
            count=1,
            is_last=emission.finish_reason is not None,
        )
        if accepted:
            self.transcripts[request].tokens.extend(emission.token_ids)
        self._carry_out(effects)

    def _attempt_taken(self, ref: WorkerRef, spec: SequenceSpec) -> None:
        report = AttemptTaken(spec.request, spec.attempt, spec.moves)
        self._carry_out(self._ledger.reported(ref, report))

    def _attempt_returned(self, ref: WorkerRef, request: RequestId, attempt: int) -> None:
        self._carry_out(self._ledger.reported(ref, AttemptReturned(request, attempt)))

    def _carry_out(self, effects: Sequence[LedgerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                order = effect.order
                spec = self.transcripts[order.request].spec(order.request, order.attempt)
                self._later(partial(self._submit, order.worker, spec))
            elif isinstance(effect, Forget):
                message = effect.message
                told = partial(self._cancel_at, effect.worker, message.request, message.attempt)
                self._later(told)
            elif isinstance(effect, RequestEnded):
                self._later(partial(self._again, effect.request, effect.attempt))
            elif isinstance(effect, Finish):
                transcript = self.transcripts[effect.request]
                transcript.finished_ns = self.now_ns
                transcript.is_cancelled = effect.outcome is not Outcome.FINISHED

    def _again(self, request: RequestId, attempt: int) -> None:
        """It waited; another worker may have taken it over since."""
        entry = self._ledger.get(request)
        if entry is not None and entry.owner is None and entry.attempt == attempt:
            self.dispatch(request, SOURCE)

    # -- nodes ----------------------------------------------------------------------------------

    def _add_node(self, ref: WorkerRef, live: LiveBatcher) -> None:
        executor = SymbolicExecutor(live.batcher, self._salts, self._states)
        self.nodes[ref] = Node(ref, TeamBatcher(live), executor)

    def _add_source(self, ref: WorkerRef, config: BatcherConfig, limits: LiveLimits) -> None:
        batcher = Batcher(config, LayerSpan(0, self.layers + 2))
        self._add_node(ref, LiveBatcher(batcher, ref.worker + 1, limits))
        self._live(ref).layers_arrived(self.layers + 2)

    def _live(self, ref: WorkerRef) -> LiveBatcher:
        live = self.nodes[ref].live
        assert live is not None
        return live

    def _can_serve(self, ref: WorkerRef) -> bool:
        return self.nodes[ref].is_alive and self.nodes[ref].live is not None

    def _later(self, action: Callable[[], None]) -> None:
        """Between the gateway and a worker."""
        self.at(self.now_ns + self.gateway_ns, action)

    def _tell(self, ref: WorkerRef, action: Callable[[], None]) -> None:
        """From a worker to the gateway. The source's words take longest: what others say of its
        requests is there before them."""
        self.at(self.now_ns + self.gateway_ns * (4 if ref == SOURCE else 1), action)

    def _between_runs(
        self,
        node: Node,
        action: Callable[[], None],
        may_come: Callable[[], bool] = lambda: False,
    ) -> None:
        node.inbox.append((action, may_come))

    def _layer_arrived(self, ref: WorkerRef, watermark: int) -> None:
        live = self.nodes[ref].live
        if live is not None:
            live.layers_arrived(watermark)

    def _submit(self, ref: WorkerRef, spec: SequenceSpec) -> None:
        serving = self.nodes[ref].serving
        if serving is None:
            return self._attempt_returned(ref, spec.request, spec.attempt)
        try:
            serving.add(spec)
        except ValueError:
            stale = [a for r, a in serving.requests() if r == spec.request]
            assert any(attempt > spec.attempt for attempt in stale), "it must fit"
        serving.validate()

    def _cancel_at(self, ref: WorkerRef, request: RequestId, attempt: int) -> None:
        serving = self.nodes[ref].serving
        if serving is not None:
            if serving.cancel(request, attempt):
                self._forgotten[ref, request, attempt] = None
            assert not serving.cancel(request, attempt), "once is enough"
            serving.validate()

    def _give_back(self, node: Node) -> None:
        serving = node.serving
        if serving is None:
            return
        self._flush(node)  # who has taken what is told before who returns it
        for request, attempt in serving.give_back():
            assert (node.ref, request, attempt) not in self._gone_from, "it is another one's"
            assert (node.ref, request, attempt) not in self._forgotten
            self._tell(
                node.ref, lambda r=request, a=attempt: self._attempt_returned(node.ref, r, a)
            )
        serving.validate()
        assert serving.inner.batcher.pool.used == 0
        assert serving.requests() == []
        self._flush(node)
        node.serving = None

    def _peer_lost(self, node: Node, peer: WorkerRef) -> None:
        if node.serving is not None:
            node.serving.peer_lost(peer)

    def _pump(self) -> None:
        """Whatever can happen now without further events."""
        for node in self.nodes.values():
            if not node.is_alive:
                node.inbox.clear()
                continue
            if node.run is None or node.is_between:
                node.is_between = False
                is_resting = node.run is None and node.ahead is None
                while node.inbox and (is_resting or node.inbox[0][1]()):
                    action, _ = node.inbox.pop(0)
                    action()
                    if node.serving is not None:
                        node.serving.validate()
                self._flush(node)
                if node.run is None and node.ahead is not None:
                    self._begin(node, *node.ahead)
                    node.ahead = None
                while not node.inbox and self._start(node):
                    pass
            self._flush(node)
            self._check(node)

    def _start(self, node: Node) -> bool:
        """Choose the next Run. An executor carries out everything in order: so this is shown the
        Run at once."""
        run = node.serving.next() if node.serving is not None else None
        if node.serving is None or run is None:
            return False
        node.runs += 1
        tokens = node.executor.run(run)
        self._check_may_run(node, run)
        if node.run is None:
            self._begin(node, run, tokens)
        else:
            assert node.ahead is None, "two Runs are enough"
            node.ahead = run, tokens
            self.ahead += 1
        return True

    def _begin(self, node: Node, run: Run, tokens: list[int]) -> None:
        node.run, node.tokens, node.began_ns = run, tokens, self.now_ns
        count = min(run.span.stop, self.layers + 1) - max(run.span.start, 1)
        duration_ns = max(1, self.run_ns + count * run.token_count * self.token_layer_ns)
        self.at(self.now_ns + duration_ns, lambda: self._finish(node, run))
        if node.live is not None and node.live.tells_layers:
            for layer in range(1, count + 1):
                told = partial(self._layer_ran, node, run, layer + 1)
                self.at(self.now_ns + duration_ns * layer // count, told)

    def _layer_ran(self, node: Node, run: Run, stop: int) -> None:
        if node.run is not run or node.live is None:
            return
        node.executor.layers_stop = stop
        node.live.layers_ran(stop)
        node.is_between = True

    def _check_may_run(self, node: Node, run: Run) -> None:
        """Layers are there, and nothing runs that another node was told to have."""
        assert node.serving is not None
        assert node.serving.has(run.span)
        for segment in run.segments:
            key = (node.ref, segment.request, segment.attempt)
            assert key not in self._gone_from, f"{key} was taken over"

    def _finish(self, node: Node, run: Run) -> None:
        if node.run is not run or node.serving is None:
            return
        node.executor.check_untouched()
        node.executor.layers_stop = run.span.stop
        self.watch(node, run)
        node.run, node.is_between = None, True
        sampled = [[token_id] for token_id in node.tokens]
        self._emit(node, node.serving.done(run, sampled, self.now_ns - node.began_ns))

    def _emit(self, node: Node, emitted: Sequence[EmittedTokens]) -> None:
        for emission in emitted:
            assert (node.ref, emission.request, emission.attempt) not in self._forgotten
            self._tell(node.ref, lambda e=emission: self._token(node.ref, e))

    def _flush(self, node: Node) -> None:
        """Say what is to be said; rows and KV go along as they are now."""
        live = node.serving
        if live is None:
            return
        for peer, message in live.take_outbox(self.now_ns):
            payload: Payload = None
            if isinstance(message, Handover) and message.rows:
                payload = node.executor.rows[message.batch]
                assert len(payload) == message.rows
            elif isinstance(message, Visit) and message.rows:
                payload = node.executor.rows[message.key]
                assert len(payload) == message.rows
            elif isinstance(message, KvLayer):
                payload = node.executor.export_kv(message.layer, live.kv_places(message.batch))
            self._send(node.ref, peer, message, payload)
        for request, attempt in live.take_returned():
            self._tell(node.ref, partial(self._attempt_returned, node.ref, request, attempt))
        for key in [key for key in node.executor.rows if not live.holds(key)]:
            del node.executor.rows[key]
        deadline_ns = live.deadline_ns()
        assert deadline_ns is None or not live.is_alone, "a member looks at no clock for it"
        if deadline_ns is not None and deadline_ns != node.wake_ns:
            assert deadline_ns > self.now_ns or node.run is not None, "late for ever"
            node.wake_ns = deadline_ns
            self.at(max(deadline_ns, self.now_ns), lambda: None)

    def _tell_taken(self, node: Node, taken: Handover) -> None:
        for spec in taken.requests:
            self._tell(node.ref, partial(self._attempt_taken, node.ref, spec))
            self.moved += taken.decoding
            for index, token_id in enumerate(spec.generated_ids if taken.decoding else ()):
                again = EmittedTokens(spec.request, spec.attempt, index, (token_id,), None)
                self._tell(node.ref, lambda e=again: self._token(node.ref, e))

    def _send(
        self, ref: WorkerRef, peer: WorkerRef, message: LiveMessage, payload: Payload
    ) -> None:
        self.messages += 1
        self.listen(ref, peer, message)
        last_ns = self._last_arrival.get((ref, peer), 0)
        at_ns = max(self.now_ns + next(self._delays), last_ns)
        self._last_arrival[ref, peer] = at_ns
        self.at(at_ns, lambda: self._arrive(ref, peer, message, payload))

    def _arrive(
        self, ref: WorkerRef, peer: WorkerRef, message: LiveMessage, payload: Payload
    ) -> None:
        sender, receiver = self.nodes[ref], self.nodes[peer]
        if frozenset((ref, peer)) in self._cut or not sender.is_alive or not receiver.is_alive:
            # A worker that cannot be reached is lost, also for one that has not noticed.
            self._between_runs(sender, lambda: self._peer_lost(sender, peer))
            return
        self._between_runs(
            receiver,
            lambda: self._take(receiver, ref, message, payload),
            lambda: receiver.serving is None or receiver.serving.may_come(ref, message),
        )

    def _take(self, node: Node, peer: WorkerRef, message: LiveMessage, payload: Payload) -> None:
        live = node.live
        if live is None:
            answer = refusal(message)
            if answer is not None:
                self._send(node.ref, peer, answer, None)
            return
        serving = node.serving
        assert serving is not None
        wanted = serving.expected_tokens(peer, message)  # raises for what cannot be
        if isinstance(message, KvLayer) and live.taker.wants_kv(peer, message):
            node.executor.import_kv(message.layer, live.kv_places(message.batch), payload)
        if isinstance(message, Taken) and message.batch in live.batches.given:
            for sequence in live.batches.given[message.batch].sequences:
                self._gone_from[node.ref, sequence.spec.request, sequence.spec.attempt] = None
        pull_ns = serving.take_message(peer, message, self.now_ns)
        self._emit(node, serving.take_emitted())
        if isinstance(message, Visit) and wanted:
            assert payload is not None
            node.executor.rows[message.key] = payload  # type: ignore[assignment]
        if pull_ns is not None:
            assert isinstance(message, Handover)
            self._tell_taken(node, message)
        if isinstance(message, Handover) and live.holds(message.batch):
            self.handovers += 1
            for spec in message.requests:  # it may have been here before
                self._gone_from.pop((node.ref, spec.request, spec.attempt), None)
            if message.rows:
                assert payload is not None
                node.executor.rows[message.batch] = payload  # type: ignore[assignment]

    # -- checks of every step -------------------------------------------------------------------

    def _check(self, node: Node) -> None:
        if node.serving is not None:
            node.serving.validate()
            node.executor.check_published()

    def _check_source_is_busy(self) -> None:
        """Without delays: what can be had is had at once, by sources that have nothing to do."""
        for ref in self.sources:
            self._check_is_busy(self.nodes[ref])

    def _check_is_busy(self, source: Node) -> None:
        if source.live is None or source.run is not None or self._heap_is_at_now():
            return
        targets = [node for ref, node in self.nodes.items() if ref not in self.sources]
        if source.live.batcher.held.reserved:  # it waits for the end of a target's Run
            assert any(node.run is not None for node in targets)
            return
        for node in targets:
            if node.live is None or node.run is not None:
                continue
            if node.live.giver.is_parted:
                continue
            for batch in node.live.giver.pullable(node.live.loaded)[:1]:
                needs = [(s.known_tokens, s.tokens_max) for s in batch.sequences]
                assert not source.live.batcher.room.fits(needs), f"{source} is idle"

    def _heap_is_at_now(self) -> bool:
        return bool(self._heap) and self._heap[0][0] == self.now_ns
