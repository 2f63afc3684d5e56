"""Teams change no token: every family, over every split of its layers, through preemption, losses,
cancellation and the end of the team, judged by stock transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import torch
from engine_instance import BLOCK_TOKENS, FamilyModel, load, request
from msgspec.structs import replace

from effort import mostly_long
from livescale.batching.contract.live_messages import Handover, KvLayer, LiveMessage
from livescale.batching.contract.visit_messages import Visit, Visited
from livescale.batching.lines.team_batcher import TeamBatcher
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.make import FAMILY_NAMES
from livescale.engine.files.model_files import model_spec
from livescale.values.routes import Partner, Team, TeamMember
from livescale.values.types import LayerSpan, Manifest, SamplingParams, WorkerRef

LAYERS = 6  # of the made models
ALL = LayerSpan(0, LAYERS)
MODELS = [name + other for name in FAMILY_NAMES for other in ("", " other")]
SOME = ["llama", "gemma2 other", "qwen3_moe"]
SPLITS = [(2,), (3,), (4,), (2, 3), (2, 4), (3, 4), (2, 3, 4)]
#: how a team ends, what a token's KV takes from one member to another, and whether KV moves
ENDS = [("move", 0, True), ("anew", 0, False), ("cheaper", 0, True), ("cheaper", 10**12, False)]
STRUCK = ["leader", "member", "link", "request"]
KV_BYTES = 1 << 20

Models = Callable[[str], FamilyModel]


@dataclass
class Member:
    """A loading instance and its executor."""

    ref: WorkerRef
    serving: TeamBatcher
    executor: TorchExecutor
    has: set[int]
    rows: dict[BatchKey, torch.Tensor] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    is_alive: bool = True


class TeamOfExecutors:
    """Members whose messages arrive at once. `tokens` are all that came, each index once."""

    def __init__(
        self,
        manifest: Manifest,
        executors: Sequence[TorchExecutor],
        cuts: Sequence[int],
        *,
        end: tuple[str, int, bool] = ENDS[0],
        kv_blocks: int = 100,
    ) -> None:
        self._end, self._kv_blocks = end, kv_blocks
        self.tokens: dict[str, list[int]] = {}
        self.returned: list[str] = []
        self.cancelled: list[str] = []
        self.kv_layers = 0
        self._specs: dict[str, SequenceSpec] = {}
        #: whose tokens count, by request
        self._owners: dict[str, Member] = {}
        self._cut: set[frozenset[int]] = set()
        #: what happens when the first message of a kind is under way
        self._strike: tuple[type, Callable[[], None]] | None = None
        spans = [LayerSpan(a, b) for a, b in pairwise((0, *cuts, LAYERS))]
        self.members = [
            Member(WorkerRef(n), self._serving(n), executor, set())
            for n, executor in enumerate(executors)
        ]
        partners = [Partner(n, member.ref) for n, member in enumerate(self.members)]
        team = [TeamMember(p, span) for p, span in zip(partners, spans, strict=True)]
        is_tied = model_spec(manifest).is_tied
        for member, span in zip(self.members, spans, strict=True):
            needed = {*range(span.start, span.stop)}
            self._land(member, needed | ({0} if is_tied and span.stop == LAYERS else set()))
        for member in self.members:
            member.serving.join(Team(1, tuple(team), end[1]))
        self._deliver()

    def add(self, spec: SequenceSpec) -> None:
        self.tokens[spec.request] = []
        self._add(spec, self.members[0])

    def end(self) -> None:
        """Everything is there."""
        for member in self.members:
            self._land(member, {*range(LAYERS)})
            member.serving.layers_arrived(LAYERS)
            member.serving.join(None)
        self._deliver()

    def play(self, turns: int | None = None) -> None:
        """So many turns, in each of which every member may run once (None: to the end)."""
        turn = 0
        while turns is None or turn < turns:
            turn += 1
            has_run = [self._run(member) for member in self._living()]
            self._deliver()
            if not any(has_run):
                return

    def strike_at(self, kind: type, strike: Callable[[], None]) -> None:
        """When the first message of this kind is under way, from now on."""
        self._strike = kind, strike

    def lose(self, number: int) -> None:
        """The member dies."""
        lost = self.members[number]
        lost.is_alive = False
        lost.rows.clear()
        for member in self._living():
            member.serving.peer_lost(lost.ref)

    def cut(self, one: int, other: int) -> None:
        """The link between the two breaks."""
        self._cut.add(frozenset((one, other)))
        for number, peer in ((one, other), (other, one)):
            self.members[number].serving.peer_lost(self.members[peer].ref)

    def cancel(self, request: str) -> None:
        """The client goes."""
        self.cancelled.append(request)
        spec = self._specs[request]
        assert self._owners[request].serving.cancel(request, spec.attempt), "it runs here"

    def run_again(self) -> None:
        """Requests that were lost or returned go on at members that live."""
        for number, (name, spec) in enumerate(list(self._specs.items())):
            got, living = self.tokens[name], self._living()
            if len(got) < spec.sampling.output_tokens_max and name not in self.cancelled:
                again = dataclasses.replace(
                    spec, attempt=spec.attempt + 1, generated_ids=tuple(got)
                )
                self._add(again, living[number % len(living)])
        self.play()

    # -- helpers --------------------------------------------------------------------------------

    def _serving(self, number: int) -> TeamBatcher:
        config = BatcherConfig(self._kv_blocks, BLOCK_TOKENS, 64, 8, growth_tokens=0)
        limits = LiveLimits(team_end=self._end[0])
        return TeamBatcher(LiveBatcher(Batcher(config, ALL), number, limits, "stop-the-world"))

    def _living(self) -> list[Member]:
        return [member for member in self.members if member.is_alive]

    def _add(self, spec: SequenceSpec, member: Member) -> None:
        self._specs[spec.request] = spec
        self._owners[spec.request] = member
        member.serving.add(spec)

    def _land(self, member: Member, layers: set[int]) -> None:
        for layer in sorted(layers - member.has, reverse=True):
            member.executor.materialize(layer)
            member.serving.layer_came(layer)
        member.has |= layers

    def _run(self, member: Member) -> bool:
        run = member.serving.next()
        if run is None:
            return False
        hidden = member.rows.pop(run.batch) if run.batch is not None and run.span.start else None
        result = member.executor.run(run, hidden)
        if run.batch is not None and isinstance(result.hidden, torch.Tensor):
            member.rows[run.batch] = result.hidden
        member.runs.append(run)
        sampled = [[token_id] for token_id in result.token_ids]
        self._emit(member, member.serving.done(run, sampled, 1000))
        return True

    def _emit(self, member: Member, emitted: Sequence[EmittedTokens]) -> None:
        for one in emitted:
            if self._owners[one.request] is not member:
                # As a gateway: another one has taken it over.
                member.serving.cancel(one.request, one.attempt)
                continue
            assert one.index == len(self.tokens[one.request]), "each token once, in order"
            self.tokens[one.request] += one.token_ids

    def _deliver(self) -> None:
        while True:
            sent = [
                (sender, peer, message, self._content(sender, message))
                for sender in self._living()
                for peer, message in sender.serving.take_outbox(1)
            ]
            for sender, peer, message, content in sent:
                if self._strike is not None and isinstance(message, self._strike[0]):
                    strike, self._strike = self._strike[1], None
                    strike()
                receiver = self.members[peer.worker]
                is_cut = frozenset((sender.ref.worker, peer.worker)) in self._cut
                if sender.is_alive and receiver.is_alive and not is_cut:
                    self._take(sender, receiver, message, content)
            for member in self._living():
                self.returned += [name for name, _ in member.serving.take_returned()]
                member.serving.validate()
                for key in [key for key in member.rows if not member.serving.holds(key)]:
                    del member.rows[key]
            if not sent:
                return

    def _content(self, sender: Member, message: LiveMessage) -> memoryview | None:
        """The bytes that go with a message."""
        if isinstance(message, Visit):
            return sender.executor.export_rows(sender.rows.pop(message.key))
        if isinstance(message, KvLayer):
            [(tokens, table)] = sender.serving.kv_places(message.batch)
            return sender.executor.export_kv(message.layer - 1, table, tokens)
        return None

    def _take(
        self, sender: Member, receiver: Member, message: LiveMessage, content: memoryview | None
    ) -> None:
        wanted = receiver.serving.expected_tokens(sender.ref, message)
        if isinstance(message, Visit) and wanted:
            assert wanted == message.rows
            receiver.rows[message.key] = receiver.executor.import_rows(content, message.rows)
        elif isinstance(message, KvLayer) and wanted:
            [(count, own)] = receiver.serving.kv_places(message.batch)
            assert count == wanted
            receiver.executor.import_kv(message.layer - 1, own, count, content)
            self.kv_layers += 1
        elif isinstance(message, Handover):
            assert message.rows == 0
        taken = receiver.serving.take_message(sender.ref, message, 1)
        if isinstance(message, Handover) and taken is not None:
            self._owners |= {spec.request: receiver for spec in message.requests}
        self._emit(receiver, receiver.serving.take_emitted())


@pytest.fixture(scope="module")
def executors(family_model: Models) -> Callable[[str, int], list[TorchExecutor]]:
    """By model's name, so many executors without any layer, the same ones each time."""
    made: dict[str, list[tuple[TorchExecutor, Manifest, bytearray]]] = {}

    def give(name: str, count: int) -> list[TorchExecutor]:
        known = made.setdefault(name, [])
        while len(known) < count:
            known.append(load(family_model(name).directory, (), KV_BYTES))
        for executor, manifest, arena in known[:count]:
            executor.assign(manifest, memoryview(arena))
            executor._pool.fill_(0xFF)  # every fp32 in it is NaN: what is not moved is missed
        return [executor for executor, _, _ in known[:count]]

    return give


def judged(model: FamilyModel, team: TeamOfExecutors, specs: Sequence[SequenceSpec]) -> None:
    """All tokens that came are greedy, and all came of requests that were not cancelled, those that
    run again included."""
    team.run_again()
    checks = model.oracle.check_many([(s.prompt_ids, team.tokens[s.request]) for s in specs])
    for spec, check in zip(specs, checks, strict=True):
        assert check.is_right, f"tokens {check.wrong} of {spec.request}"
        is_whole = len(team.tokens[spec.request]) == spec.sampling.output_tokens_max
        assert is_whole or spec.request in team.cancelled
    for member in (member for member in team.members if member.is_alive):
        assert member.serving.inner.batcher.pool.used == 0, "KV of ended requests is free"
        assert member.serving.is_alone
        assert not member.rows


def manifest_of(executor: TorchExecutor) -> Manifest:
    return executor._model.manifest


@pytest.mark.parametrize(
    ("name", "cuts", "end"),
    mostly_long(
        [(name, cuts, end) for name in MODELS for cuts in SPLITS for end in ENDS],
        [
            *((name, (2, 4), end) for name in SOME for end in ENDS[:2]),
            *(("llama", cuts, end) for cuts in SPLITS[:3] for end in ENDS[:2]),
            *(("llama", (2, 4), end) for end in ENDS[2:]),
        ],
    ),
)
def test_tokens_are_right_through_visits_and_the_end_of_the_team(
    family_model: Models,
    executors: Callable[[str, int], list[TorchExecutor]],
    name: str,
    cuts: tuple[int, ...],
    end: tuple[str, int, bool],
) -> None:
    model = family_model(name)
    members = executors(name, len(cuts) + 1)
    team = TeamOfExecutors(manifest_of(members[0]), members, cuts, end=end)
    specs = begun(team, name)
    team.end()
    team.play()
    moves = end[2]
    assert bool(team.kv_layers) is moves
    for member in team.members:
        assert {run.span for run in member.runs if run.is_visit} != {ALL}
    shares = [sum(not run.is_visit for run in member.runs) > 0 for member in team.members]
    assert all(shares) if moves else bool(team.returned)
    judged(model, team, specs)


@pytest.mark.parametrize(
    ("name", "end", "what"),
    mostly_long(
        [(name, end, what) for name in SOME for end in ENDS for what in STRUCK],
        [
            *(
                ("llama", end, what)
                for end, what in zip(ENDS, [*STRUCK[:3], "leader"], strict=True)
            ),
            *(("llama", end, "request") for end in ENDS),
        ],
    ),
)
def test_tokens_are_right_if_something_is_lost_at_the_end_of_the_team(
    family_model: Models,
    executors: Callable[[str, int], list[TorchExecutor]],
    name: str,
    end: tuple[str, int, bool],
    what: str,
) -> None:
    """While KV is fetched, or while the last Runs of the team come home."""
    members = executors(name, 3)
    team = TeamOfExecutors(manifest_of(members[0]), members, (2, 4), end=end)
    specs = begun(team, name)
    strikes = {
        "leader": partial(team.lose, 0),
        "member": partial(team.lose, 1),
        "link": partial(team.cut, 0, 2),
        "request": partial(team.cancel, specs[1].request),
    }
    struck = []
    team.strike_at(KvLayer if end[2] else Visited, lambda: struck.append(strikes[what]()))
    team.end()
    team.play()
    assert struck
    judged(family_model(name), team, specs)


def begun(team: TeamOfExecutors, name: str) -> list[SequenceSpec]:
    """Six requests, in the midst of which the team is to end."""
    specs = [request(f"{name}{n}", 5 + 7 * n, 20, 512) for n in range(6)]
    for spec in specs:
        team.add(spec)
    team.play(turns=30)
    tokens = sum(map(len, team.tokens.values()))
    assert 0 < tokens < 6 * 20
    return specs


def test_requests_are_preempted_for_want_of_the_smallest_quota(
    family_model: Models, executors: Callable[[str, int], list[TorchExecutor]]
) -> None:
    members = executors("llama", 2)
    team = TeamOfExecutors(manifest_of(members[0]), members, (3,), kv_blocks=14)
    specs = [request(f"p{n}", 9, 24, 512) for n in range(5)]
    for spec in specs:
        team.add(spec)
    lead = team.members[0].serving.side.lead
    team.play()
    assert lead is not None
    assert lead.batcher is not None
    assert lead.batcher.room.preemptions > 0
    team.end()
    team.play()
    judged(family_model("llama"), team, specs)


def test_sampled_tokens_are_those_of_one_instance(
    family_model: Models, executors: Callable[[str, int], list[TorchExecutor]]
) -> None:
    """Temperature, penalties and seeds: the member that samples knows what came before."""
    way = SamplingParams(16, temperature=0.8, top_k=20, repetition_penalty=1.3, seed=5)
    specs = [request(f"s{n}", 9 + n, 16, 512) for n in range(4)]
    drawn = [
        SequenceSpec(s.request, s.attempt, s.prompt_ids, replace(way, seed=n))
        for n, s in enumerate(specs)
    ]
    found = []
    for cuts in ((2,), (2, 3, 4)):
        members = executors("llama", len(cuts) + 1)
        team = TeamOfExecutors(manifest_of(members[0]), members, cuts)
        for spec in drawn:
            team.add(spec)
        team.play()
        team.end()
        found.append(team.tokens)
    assert found[0] == found[1]
    assert all(len(tokens) == 16 for tokens in found[0].values())
