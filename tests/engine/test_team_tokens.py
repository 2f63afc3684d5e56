"""Teams change no token: every family, over every split of its layers, through preemption and the
end of the team, judged by stock transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from engine_instance import BLOCK_TOKENS, FamilyModel, load, request
from msgspec.structs import replace

from effort import mostly_long
from livescale.batching.contract.live_messages import Handover, KvLayer, LiveMessage, Visit
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


class TeamOfExecutors:
    """Members whose messages arrive at once. `tokens` are all that came, each index once."""

    def __init__(
        self, manifest: Manifest, executors: Sequence[TorchExecutor], cuts: Sequence[int], **limits
    ) -> None:
        self._manifest = manifest
        self.tokens: dict[str, list[int]] = {}
        self.returned: list[str] = []
        self.kv_layers = 0
        spans = [LayerSpan(a, b) for a, b in pairwise((0, *cuts, LAYERS))]
        self.members = [
            Member(WorkerRef(n), self._serving(n, **limits), executor, set())
            for n, executor in enumerate(executors)
        ]
        partners = [Partner(n, member.ref) for n, member in enumerate(self.members)]
        team = [TeamMember(p, span) for p, span in zip(partners, spans, strict=True)]
        is_tied = model_spec(manifest).is_tied
        for member, span in zip(self.members, spans, strict=True):
            needed = {*range(span.start, span.stop)}
            self._land(member, needed | ({0} if is_tied and span.stop == LAYERS else set()))
        for member in self.members:
            member.serving.join(Team(1, tuple(team)))
        self._deliver()

    def add(self, spec: SequenceSpec) -> None:
        self.tokens[spec.request] = []
        self.members[0].serving.add(spec)

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
            has_run = [self._run(member) for member in self.members]
            self._deliver()
            if not any(has_run):
                return

    # -- helpers --------------------------------------------------------------------------------

    def _serving(self, number: int, *, kv_blocks: int = 100, team_kv: bool = True) -> TeamBatcher:
        config = BatcherConfig(kv_blocks, BLOCK_TOKENS, 64, 8, growth_tokens=0)
        limits = LiveLimits(team_end="move" if team_kv else "anew")
        return TeamBatcher(LiveBatcher(Batcher(config, ALL), number, limits, "stop-the-world"))

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
        self._emit(member.serving.done(run, sampled, 1000))
        return True

    def _emit(self, emitted: Sequence[EmittedTokens]) -> None:
        for one in emitted:
            assert one.index == len(self.tokens[one.request]), "each token once, in order"
            self.tokens[one.request] += one.token_ids

    def _deliver(self) -> None:
        while True:
            sent = [(m, *one) for m in self.members for one in m.serving.take_outbox(1)]
            for sender, peer, message in sent:
                self._take(sender, self.members[peer.worker], message)
            for member in self.members:
                self.returned += [name for name, _ in member.serving.take_returned()]
                member.serving.validate()
            if not sent:
                return

    def _take(self, sender: Member, receiver: Member, message: LiveMessage) -> None:
        wanted = receiver.serving.expected_tokens(sender.ref, message)
        if isinstance(message, Visit):
            content = sender.executor.export_rows(sender.rows.pop(message.key))
            assert wanted == message.rows
            receiver.rows[message.key] = receiver.executor.import_rows(content, message.rows)
        elif isinstance(message, KvLayer):
            [(tokens, table)] = sender.serving.kv_places(message.batch)
            content = sender.executor.export_kv(message.layer - 1, table, tokens)
            [(count, own)] = receiver.serving.kv_places(message.batch)
            assert count == wanted == tokens
            receiver.executor.import_kv(message.layer - 1, own, count, content)
            self.kv_layers += 1
        elif isinstance(message, Handover):
            assert message.rows == 0
        receiver.serving.take_message(sender.ref, message, 1)
        self._emit(receiver.serving.take_emitted())


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
    """All tokens that came are greedy, and all came that are not to run elsewhere."""
    checks = model.oracle.check_many([(s.prompt_ids, team.tokens[s.request]) for s in specs])
    for spec, check in zip(specs, checks, strict=True):
        assert check.is_right, f"tokens {check.wrong} of {spec.request}"
        is_whole = len(team.tokens[spec.request]) == spec.sampling.output_tokens_max
        assert is_whole or spec.request in team.returned
    for member in team.members:
        assert member.serving.inner.batcher.pool.used == 0, "KV of ended requests is free"
        assert member.serving.is_alone
        assert not member.rows


def manifest_of(executor: TorchExecutor) -> Manifest:
    return executor._model.manifest


@pytest.mark.parametrize(
    ("name", "cuts"),
    mostly_long(
        [(name, cuts) for name in MODELS for cuts in SPLITS],
        [*((name, (2, 4)) for name in SOME), *(("llama", cuts) for cuts in SPLITS[:3])],
    ),
)
@pytest.mark.parametrize("team_kv", [True, False])
def test_tokens_are_right_through_visits_and_the_end_of_the_team(
    family_model: Models,
    executors: Callable[[str, int], list[TorchExecutor]],
    name: str,
    cuts: tuple[int, ...],
    team_kv: bool,
) -> None:
    model = family_model(name)
    members = executors(name, len(cuts) + 1)
    team = TeamOfExecutors(manifest_of(members[0]), members, cuts, team_kv=team_kv)
    specs = [request(f"{name}{n}", 5 + 7 * n, 20, 512) for n in range(6)]
    for spec in specs:
        team.add(spec)
    team.play(turns=30)
    begun = sum(map(len, team.tokens.values()))
    assert 0 < begun < 6 * 20, "the team ends in the midst of it"
    team.end()
    team.play()
    judged(model, team, specs)
    assert bool(team.kv_layers) is team_kv
    for member in team.members:
        assert {run.span for run in member.runs if run.is_visit} != {ALL}
    shares = [sum(not run.is_visit for run in member.runs) > 0 for member in team.members]
    assert all(shares) if team_kv else bool(team.returned)


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
