"""A world of a model in stages: instances in pipelines, links with delays, and executors that write
symbols where real ones write numbers. Everything may come and go in it."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from kv_double import reference
from live_parts import Rows, SymbolicExecutor, Transcript

from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.contract.visit_messages import Visit
from livescale.batching.lines.stage_batcher import StageBatcher
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, Run, SequenceSpec
from livescale.values.routes import Partner, Pipeline, TeamMember
from livescale.values.stages import stages_of
from livescale.values.types import LayerSpan, RequestId, SamplingParams, StageOf, WorkerRef

LAYERS_OF_STAGE = 2
CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)


class StageExecutor(SymbolicExecutor):
    """Of a stage: by the model's numbers of layers."""

    def __init__(self, batcher: Batcher, stage: StageOf, layers: int, *told: dict) -> None:
        super().__init__(batcher, *told)
        self._stage, self._all_layers = stage, layers

    def run(self, run: Run) -> list[int]:
        assert run.span == self._batcher.span, "all layers of the stage"
        return super().run(msgspec.structs.replace(run, span=self._stage.span(run.span.stop)))

    @property
    def _layers(self) -> int:
        return self._all_layers


@dataclass
class StageNode:
    """One worker and its instance."""

    ref: WorkerRef
    stage: StageOf
    serving: StageBatcher
    executor: StageExecutor
    is_alive: bool = True
    runs: deque[tuple[Run, list[int]]] = field(default_factory=deque)
    #: waits for a time without any Run
    waiting: list[Callable[[], None]] = field(default_factory=list)
    wake_ns: int | None = None


class StageWorld:
    """Of each stage there are as many instances as `counts` has, with `kv_blocks` in turns. A Run
    takes `run_ns`, and `token_ns` for each position."""

    def __init__(
        self,
        counts: Sequence[int],
        *,
        merges: bool = True,
        config: BatcherConfig = CONFIG,
        kv_blocks: Sequence[int] = (CONFIG.kv_blocks,),
        delays: Sequence[int] = (5,),
        run_ns: int = 100,
        token_ns: int = 1,
    ) -> None:
        self.now_ns = 0
        self.run_ns, self.token_ns = run_ns, token_ns
        self.transcripts: dict[RequestId, Transcript] = {}
        self._owners: dict[RequestId, tuple[WorkerRef, int]] = {}
        self._salts: dict[RequestId, str] = {}
        self._delays = itertools.cycle(delays)
        self._arrivals: dict[tuple[WorkerRef | None, WorkerRef], int] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._number = 0
        #: by leader: its pipeline
        self._known: dict[WorkerRef, Pipeline] = {}
        #: pipelines that broke, and are formed anew
        self._broken: set[int] = set()
        #: living workers that do not reach each other now, and how often any two did not
        self._apart: set[frozenset[WorkerRef]] = set()
        self._cuts: Counter[frozenset[WorkerRef]] = Counter()
        self.nodes: dict[WorkerRef, StageNode] = {}
        #: those that had several parts, and all; those of later stages
        self.merged = self.executions = 0
        layers = LAYERS_OF_STAGE * len(counts) + 2
        edges = [0, *(1 + LAYERS_OF_STAGE * n for n in range(1, len(counts))), layers]
        spans = [LayerSpan(a, b) for a, b in itertools.pairwise(edges)]
        states: dict[tuple[RequestId, int], list[int]] = {}
        limits = LiveLimits(answer_ns=1_000_000, merges_runs=merges)
        for (stage, own), count in zip(stages_of("m", layers, spans), counts, strict=True):
            for _ in range(count):
                ref = WorkerRef(len(self.nodes))
                blocks = kv_blocks[ref.worker % len(kv_blocks)]
                batcher = Batcher(replace(config, kv_blocks=blocks), LayerSpan(0, own))
                executor = StageExecutor(batcher, stage, layers - 2, self._salts, states)
                serving = StageBatcher(batcher, ref.worker + 1, stage, limits)
                serving.layers_arrived(own)
                self.nodes[ref] = StageNode(ref, stage, serving, executor)
        self.form()

    # -- what a test does -----------------------------------------------------------------------

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_ns, next(self._order), action))

    def form(self) -> None:
        """Pipelines of all that live: each node is told after a while. As with the controller, a
        leader's keeps its number unless that is broken, and has the same members, or has other
        shares."""
        stages = self._living()
        leaders = stages[0]
        pipelines = []
        for n, leader in enumerate(leaders):
            own = [
                [one for m, one in enumerate(stage) if m % len(leaders) == n]
                if len(stage) >= len(leaders)
                else [stage[n % len(stage)]]
                for stage in stages[1:]
            ]
            shares = max([1, *(-(-len(leaders) // len(stage)) for stage in stages[1:])])
            ways = self._reached([[leader], *own])
            members = tuple(tuple(self._member(node) for node in stage) for stage in ways)
            pipelines.append(self._numbered(leader, members, shares))
        for node in itertools.chain.from_iterable(stages):
            partner = self._member(node).partner
            own_ones = [p for p in pipelines if partner in [m.partner for m in p.members]]
            told = partial(self._between, node, partial(node.serving.follow, own_ones))
            self.at(self._arrives_ns(None, node.ref), told)

    def request(self, name: str, leader: int, prompt_ids: Sequence[int], outputs: int) -> None:
        """A new request comes to this one of the leaders."""
        self.transcripts[name] = Transcript(tuple(prompt_ids), SamplingParams(outputs), "")
        self._salts[name] = ""
        self._dispatch(name, 1, leader)

    def cancel(self, name: str) -> None:
        """The client goes."""
        if name in self._owners:
            ref, attempt = self._owners.pop(name)
            self.transcripts[name].is_cancelled = True
            node = self.nodes[ref]
            if node.is_alive:
                node.serving.cancel(name, attempt)
                self._go_on(node)

    def lose(self, which: int) -> None:
        """A worker dies, unless it is the last of its stage; then there are new pipelines."""
        node = self.nodes[WorkerRef(which % len(self.nodes))]
        if not node.is_alive or len(self._living()[node.stage.number]) < 2:
            return
        node.is_alive = False
        for other in self.nodes.values():
            if other.is_alive:
                self._between(other, partial(other.serving.peer_lost, node.ref))
        for name, (ref, attempt) in [*self._owners.items()]:
            if ref == node.ref:
                self._dispatch(name, attempt + 1, 0)
        self.at(self.now_ns + 200, self.form)

    def cut(self, which: int, other: int, for_ns: int) -> None:
        """Two living workers do not reach each other for a while. What is on its way between them
        is lost, and nothing else."""
        ends = [self.nodes[WorkerRef(n % len(self.nodes))] for n in (which, other)]
        pair = frozenset(node.ref for node in ends)
        if len(pair) < 2 or pair in self._apart or not all(node.is_alive for node in ends):
            return
        self._apart.add(pair)
        self._cuts[pair] += 1
        for node, far in (ends, ends[::-1]):
            self._between(node, partial(node.serving.peer_lost, far.ref))
        self.at(self.now_ns + 200, self.form)
        self.at(self.now_ns + for_ns, partial(self._joined, pair))

    def play(self, events_max: int = 60_000) -> None:
        """Let everything happen."""
        for _ in range(events_max):
            if not self._heap:
                return
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()
        raise AssertionError(f"no end: {self.nodes}")

    def check_end(self) -> None:
        """Every request has its tokens, and nothing is left anywhere."""
        assert not self._owners
        for name, transcript in self.transcripts.items():
            spec = SequenceSpec(name, 1, transcript.prompt_ids, transcript.sampling)
            expected = reference(spec)
            got = transcript.tokens
            known = expected[: len(got)] if transcript.is_cancelled else expected
            assert got == known, (name, transcript)
        for node in self.nodes.values():
            if node.is_alive:
                assert node.serving.kv_in_use == 0, node
                assert node.serving.requests() == [], node
                assert not node.executor.rows, node
                assert node.serving.visitors.waiting == 0, node

    def waited_ns(self, stage: int) -> int:
        """In line at instances of this stage, in all."""
        counts = (node.serving.report().stage for node in self._living()[stage])
        return sum(its.waited_ns for its in counts if its is not None)

    # -- nodes ----------------------------------------------------------------------------------

    def _living(self) -> list[list[StageNode]]:
        found: dict[int, list[StageNode]] = {}
        for node in self.nodes.values():
            if node.is_alive:
                found.setdefault(node.stage.number, []).append(node)
        return [found[number] for number in sorted(found)]

    def _joined(self, pair: frozenset[WorkerRef]) -> None:
        self._apart.discard(pair)
        self.form()

    def _reached(self, ways: Sequence[Sequence[StageNode]]) -> list[list[StageNode]]:
        """Without the later one of any two that are apart, where its stage has others."""
        left = [list(stage) for stage in ways]
        for stage, later_stage in itertools.combinations(left, 2):
            for one, later in itertools.product(stage, [*later_stage]):
                is_apart = frozenset((one.ref, later.ref)) in self._apart
                if is_apart and later in later_stage and len(later_stage) > 1:
                    later_stage.remove(later)
        return left

    def _numbered(
        self, leader: StageNode, members: tuple[tuple[TeamMember, ...], ...], shares: int
    ) -> Pipeline:
        before, broke = self._known.get(leader.ref), leader.serving.team_broke
        number = 0
        if before is not None and before.shares == shares:
            is_broken = broke is not None and broke.team == before.number
            number = 0 if is_broken and before.stages == members else before.number
        if not number:
            self._number = number = self._number + 1
        self._known[leader.ref] = Pipeline(number, members, shares)
        return self._known[leader.ref]

    def _member(self, node: StageNode) -> TeamMember:
        span = node.stage.span(node.serving.batcher.span.stop)
        return TeamMember(Partner(node.ref.worker + 1, node.ref), span)

    def _dispatch(self, name: str, attempt: int, leader: int) -> None:
        leaders = self._living()[0]
        node = leaders[leader % len(leaders)]
        self._owners[name] = node.ref, attempt
        node.serving.add(self.transcripts[name].spec(name, attempt))
        self._go_on(node)

    def _between(self, node: StageNode, action: Callable[[], None]) -> None:
        """Now, or when no Run is in flight."""
        if node.is_alive:
            node.waiting.append(action)
            self._go_on(node)

    def _go_on(self, node: StageNode) -> None:
        serving = node.serving
        while node.waiting and not node.runs:
            node.waiting.pop(0)()
        self._flush(node)
        while not node.waiting and (run := serving.next()) is not None:
            if not node.stage.is_first:
                self.executions += 1
                self.merged += len(run.parts) - 1
            assert run.token_count <= max(CONFIG.run_tokens_max, run.parts[0].token_count)
            node.runs.append((run, node.executor.run(run)))
            if len(node.runs) == 1:
                self._begin(node)
        self._flush(node)
        serving.validate()
        node.executor.check_published()

    def _begin(self, node: StageNode) -> None:
        took_ns = self.run_ns + self.token_ns * node.runs[0][0].token_count
        self.at(self.now_ns + took_ns, partial(self._ended, node, took_ns))

    def _ended(self, node: StageNode, took_ns: int) -> None:
        if not node.is_alive:
            return
        run, tokens = node.runs.popleft()
        sampled = [[token_id] for token_id in tokens] if node.stage.is_last else []
        self._emit(node, node.serving.done(run, sampled, took_ns))
        if node.runs:
            self._begin(node)
        self._go_on(node)

    def _emit(self, node: StageNode, emitted: Sequence[EmittedTokens]) -> None:
        for one in emitted:
            if self._owners.get(one.request) != (node.ref, one.attempt):
                continue
            tokens = self.transcripts[one.request].tokens
            assert one.index == len(tokens), one
            tokens.extend(one.token_ids)
            if one.finish_reason is not None:
                self.transcripts[one.request].finished_ns = self.now_ns
                del self._owners[one.request]

    def _flush(self, node: StageNode) -> None:
        """Say what is to be said; rows go along as they are now."""
        serving, rows = node.serving, node.executor.rows
        for peer, message in serving.take_outbox(self.now_ns):
            payload = rows[message.key] if isinstance(message, Visit) and message.rows else ()
            cuts = self._cuts[frozenset((node.ref, peer))]
            told = partial(self._arrive, node.ref, peer, message, payload, cuts)
            self.at(self._arrives_ns(node.ref, peer), told)
        for request, attempt in serving.take_returned():
            if self._owners.get(request) == (node.ref, attempt):
                again = partial(self._again, request, attempt)
                self.at(self.now_ns + 50, again)
        for key in [key for key in rows if not serving.holds(key)]:
            del rows[key]
        self._form_broken(node)
        deadline_ns = serving.deadline_ns()
        if deadline_ns is not None and deadline_ns != node.wake_ns:
            node.wake_ns = deadline_ns
            self.at(max(deadline_ns, self.now_ns), partial(self._wake, node))

    def _form_broken(self, leader: StageNode) -> None:
        """As the controller does, which is told of a pipeline that broke. What broke an older one
        says nothing of it."""
        known, broke = self._known.get(leader.ref), leader.serving.team_broke
        if known is None or broke is None or broke.team != known.number:
            return
        if broke.team not in self._broken:
            self._broken.add(broke.team)
            self.at(self.now_ns + 200, self.form)

    def _arrives_ns(self, sender: WorkerRef | None, receiver: WorkerRef) -> int:
        """When the next message does: in order, from a worker or from the controller."""
        last_ns = self._arrivals.get((sender, receiver), 0)
        at_ns = max(self.now_ns + next(self._delays), last_ns)
        self._arrivals[sender, receiver] = at_ns
        return at_ns

    def _wake(self, node: StageNode) -> None:
        if node.is_alive:
            self._go_on(node)

    def _again(self, request: RequestId, attempt: int) -> None:
        if request in self._owners and self._owners[request][1] == attempt:
            self._dispatch(request, attempt + 1, attempt)

    def _arrive(
        self, ref: WorkerRef, peer: WorkerRef, message: LiveMessage, payload: Rows, cuts: int
    ) -> None:
        """Their connection had broken so often when it was sent."""
        node, pair = self.nodes[peer], frozenset((ref, peer))
        if self._cuts[pair] > cuts or not self.nodes[ref].is_alive:
            return
        if not node.is_alive or pair in self._apart:  # no connection can be made
            sender = self.nodes[ref]
            self._between(sender, partial(sender.serving.peer_lost, peer))
            return
        take = partial(self._take, node, ref, message, payload)
        if node.waiting or (node.runs and not node.serving.may_come(ref, message)):
            self._between(node, take)
        else:
            take()
            self._go_on(node)

    def _take(self, node: StageNode, peer: WorkerRef, message: LiveMessage, payload: Rows) -> None:
        wanted = node.serving.expected_tokens(peer, message)
        if isinstance(message, Visit) and wanted:
            assert message.key not in node.executor.rows, f"rows of {message.key} are there"
            node.executor.rows[message.key] = payload
        node.serving.take_message(peer, message, self.now_ns)
        self._emit(node, node.serving.take_emitted())
