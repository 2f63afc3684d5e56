"""A member whose executor is an engine that schedules by itself, and needs whole models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from member_world import KV_LAYER_BYTES, LAYER_BYTES, LIVE, MEMORY_BYTES

from livescale.batching.contract.live_messages import Offer, Parted
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.engine_step import EngineLoad, EngineStep, StepTokens
from livescale.batching.runs.run import BatchKey, EngineAsk, SequenceSpec
from livescale.member.effects import Answer, Effect, Emit, Execute, Report, TellPeer
from livescale.member.inputs import (
    AllCame,
    ExecutorReady,
    LayerCame,
    MemberInput,
    Ordered,
    PeerSent,
    RateMeasured,
    RunEnded,
    Submitted,
)
from livescale.member.instance import ServingLimits
from livescale.messages.attempts import AttemptFailed, AttemptReturned, Cancel
from livescale.messages.commands import ChangeDuty, ReleaseHolding, StartHolding
from livescale.messages.events import CapacityMeasured, InstanceReported, LiveStarted, RequestEnded
from livescale.telemetry.member_record import RecordedMember, read_member_record
from livescale.telemetry.replay import replay_member
from livescale.values.routes import Duty, Partner, Taker
from livescale.values.types import (
    FinishReason,
    HoldingId,
    InstanceId,
    LayerSpan,
    Outcome,
    RequestId,
    SamplingParams,
    WorkerRef,
)

OWN, PEER = WorkerRef(0), WorkerRef(1)
INSTANCE: InstanceId = 3
SPAN = LayerSpan(0, len(LAYER_BYTES))
BLOCKS, BLOCK_TOKENS = 7, 4
DUTY = Duty(INSTANCE, (OWN,))
HOLDING = HoldingId(1, OWN)
ALL_CAME = AllCame(1, sum(LAYER_BYTES))
ATTEMPTS = st.tuples(st.sampled_from(("a", "b", "c")), st.integers(1, 3))
Attempt = tuple[RequestId, int]


@dataclass
class ToyEngine:
    """Takes what it is asked to, and computes for whom it likes."""

    held: dict[Attempt, SequenceSpec] = field(default_factory=dict)
    done: dict[Attempt, int] = field(default_factory=dict)

    def step(self, ask: EngineAsk, chosen: frozenset[str], refuses: bool) -> EngineStep:
        """One token for those whose request is `chosen`."""
        for attempt in ask.forgotten:
            assert attempt in self.done, "it was never told of it"
            self.held.pop(attempt, None)
        refused = []
        for spec in ask.taken:
            attempt = (spec.request, spec.attempt)
            assert attempt not in self.done, "it is told once"
            self.done[attempt] = len(spec.generated_ids)
            if refuses:
                refused.append((*attempt, "it does not like it"))
            else:
                self.held[attempt] = spec
        tokens = [self._token(attempt) for attempt in [*self.held] if attempt[0] in chosen]
        load = EngineLoad(running=len(self.held), kv_blocks_used=len(self.held))
        return EngineStep(tuple(tokens), (), tuple(refused), load, prefill_tokens=len(ask.taken))

    def _token(self, attempt: Attempt) -> StepTokens:
        self.done[attempt] += 1
        reason = None
        if self.done[attempt] == self.held[attempt].sampling.output_tokens_max:
            reason = FinishReason.LENGTH
            del self.held[attempt]
        return StepTokens(*attempt, (100 + self.done[attempt],), reason)


class Witness:
    """A recorded member with an engine, and all that came out of it."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.engine = ToyEngine()
        limits = ServingLimits("other", LIVE, is_engine=True)
        self.member = RecordedMember(self, OWN, MEMORY_BYTES, limits)
        self.effects: list[Effect] = []
        self.in_flight: EngineAsk | None = None
        self._now_ns = 0

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def step(self, *news: MemberInput) -> list[Effect]:
        self._now_ns += 1
        found = self.member.step(self._now_ns, news)
        self.effects += found
        for effect in found:
            if isinstance(effect, Execute):
                assert self.in_flight is None, "one step after the other"
                self.in_flight = effect.run.asks
                assert self.in_flight is not None
        return found

    def begin(self, *, measures: bool = False, duty: Duty = DUTY) -> None:
        order = StartHolding(HOLDING, "m", SPAN, (), 400, duty=duty, measure_capacity=measures)
        ready = ExecutorReady(1, BatcherConfig(BLOCKS, BLOCK_TOKENS, 64, 8), KV_LAYER_BYTES, 16)
        self.step(Ordered(order, LAYER_BYTES, "m"))
        self.step(ready)

    def load(self, *, measures: bool = False) -> None:
        self.begin(measures=measures)
        self.step(*(LayerCame(1, layer) for layer in range(SPAN.stop)), ALL_CAME)

    def submit(self, attempt: Attempt, tokens: int = 2, **more: object) -> None:
        spec = SequenceSpec(*attempt, (5, 6), SamplingParams(tokens), **more)  # type: ignore[arg-type]
        self.step(Submitted("g", INSTANCE, spec))

    def run(self, chosen: frozenset[str] = frozenset("abc"), refuses: bool = False) -> None:
        """The step in flight, if there is one."""
        if self.in_flight is not None:
            ask, self.in_flight = self.in_flight, None
            self.step(RunEnded([], 10, self.engine.step(ask, chosen, refuses)))

    def give_up(self) -> None:
        """The step in flight waits for layers, and ends without tokens."""
        assert self.in_flight is not None
        self.in_flight = None
        self.engine = ToyEngine()
        self.step(RunEnded([], 10, EngineStep(is_given_up=True)))

    def reports(self) -> Iterator[object]:
        return (effect.event for effect in self.effects if isinstance(effect, Report))

    def ended(self) -> list[tuple[RequestId, int, Outcome]]:
        found = [event for event in self.reports() if isinstance(event, RequestEnded)]
        return [(event.request, event.attempt, event.outcome) for event in found]

    def tokens(self) -> list[tuple[RequestId, int, int, int]]:
        """(request, attempt, index, token) in order."""
        emitted = [e for its in self.effects if isinstance(its, Emit) for e in its.emitted]
        return [(e.request, e.attempt, e.index, t) for e in emitted for t in e.token_ids]


Act = tuple[str, Attempt, frozenset[str]]
ACTS = st.tuples(
    st.sampled_from(("submit", "cancel", "run", "run", "refuse")),
    ATTEMPTS,
    st.frozensets(st.sampled_from("abc")),
)


@given(st.lists(ACTS, max_size=40))
def test_every_attempt_ends_once_with_its_tokens_in_order(acts: list[Act]) -> None:
    """Whatever the engine does first, and whatever comes in while a step is in flight. The engine
    has what the instance has, but for what it is to forget before its next step."""
    world = Witness()
    world.load()
    submitted: dict[Attempt, None] = {}
    for what, attempt, chosen in acts:
        if what == "submit" and attempt not in submitted:
            newest = max([n for name, n in submitted if name == attempt[0]], default=0)
            if attempt[1] > newest:
                submitted[attempt] = None
                world.submit(attempt)
        elif what == "cancel":
            world.step(Cancel(*attempt))
        elif what in ("run", "refuse"):
            world.run(chosen, refuses=what == "refuse")
    while world.in_flight is not None:
        world.run()
    assert not world.engine.held, "nothing is computed for no one"
    ended = [(name, number) for name, number, _ in world.ended()]
    assert len(ended) == len(set(ended))
    # A newer attempt takes the place of an older one without a word.
    newest = dict(sorted(submitted))
    assert {attempt for attempt in submitted if newest[attempt[0]] == attempt[1]} <= set(ended)
    places: dict[Attempt, int] = {}
    for name, number, index, token in world.tokens():
        assert index == places.get((name, number), 0)
        assert token == 101 + index
        places[name, number] = index + 1
    finished = [(n, a) for n, a, outcome in world.ended() if outcome is Outcome.FINISHED]
    assert all(places[attempt] == 2 for attempt in finished)


def test_nothing_runs_before_the_model_is_whole(tmp_path: Path) -> None:
    world = Witness()
    world.load(measures=True)
    world.submit(("a", 1))
    assert world.in_flight is None, "its rate is measured first"
    assert not any(isinstance(event, LiveStarted) for event in world.reports())
    world.step(RateMeasured(1, 1000))
    assert world.in_flight is not None
    assert [spec.request for spec in world.in_flight.taken] == ["a"]
    world.run()
    world.run()
    assert world.ended() == [("a", 1, Outcome.FINISHED)]
    capacity = [event for event in world.reports() if isinstance(event, CapacityMeasured)]
    assert capacity == [CapacityMeasured("other", "m", 1000, BLOCKS)]
    loads = [event for event in world.reports() if isinstance(event, InstanceReported)]
    assert [(load.running, load.kv_blocks_used) for load in loads[-2:]] == [(1, 1), (0, 0)]
    assert loads[-1].emitted_tokens == 2
    # The same inputs give the same effects to a fresh member.
    record = tmp_path / "member.jsonl"
    record.write_bytes(b"".join(world.lines))
    assert replay_member(read_member_record(record)).steps > 4


def test_tokens_go_on_where_an_earlier_attempt_ended() -> None:
    world = Witness()
    world.load()
    world.submit(("a", 2), tokens=3, generated_ids=(101,))
    world.run()
    world.run()
    assert world.tokens() == [("a", 2, 1, 102), ("a", 2, 2, 103)]


def test_what_the_engine_refuses_fails_with_its_words_and_the_rest_goes_on() -> None:
    world = Witness()
    world.load()
    world.submit(("a", 1))
    world.run(frozenset(), refuses=True)
    answers = [effect.answer for effect in world.effects if isinstance(effect, Answer)]
    assert answers == [AttemptFailed("a", 1, "it does not like it")]
    world.submit(("b", 1))
    world.run()
    world.run()
    assert world.ended() == [("a", 1, Outcome.FAILED), ("b", 1, Outcome.FINISHED)]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParams(1, embeds=True), "embeddings: the engine of this model gives none"),
        (SamplingParams(27), "a request of 29 tokens, and KV for 28"),
    ],
)
def test_what_can_never_run_is_refused_at_once(sampling: SamplingParams, words: str) -> None:
    world = Witness()
    world.load()
    world.step(Submitted("g", INSTANCE, SequenceSpec("a", 1, (5, 6), sampling)))
    answers = [effect.answer for effect in world.effects if isinstance(effect, Answer)]
    assert answers == [AttemptFailed("a", 1, words)]
    assert world.in_flight is None


def test_a_partner_is_told_that_nothing_passes_and_what_is_left_runs_elsewhere() -> None:
    world = Witness()
    world.load()
    offer = Offer(INSTANCE, BatchKey(9, 1), (5,), (6,))
    world.step(PeerSent(PEER, offer))
    told = [(e.peer, e.message) for e in world.effects if isinstance(e, TellPeer)]
    assert told == [(PEER, Parted(9))]
    world.submit(("a", 1))
    world.run()
    world.run(frozenset())
    world.step(Ordered(ReleaseHolding(HOLDING)))
    world.run(frozenset())
    assert world.ended() == [("a", 1, Outcome.RETURNED)]


def test_an_instance_that_drains_returns_what_has_no_token_yet() -> None:
    world = Witness()
    world.load()
    world.submit(("a", 1), tokens=4)
    world.submit(("b", 1))
    world.run()
    world.run(frozenset("a"))
    drains = Duty(INSTANCE, (OWN,), drains_to=(Taker(Partner(4, PEER)),))
    world.step(Ordered(ChangeDuty(HOLDING, drains)))
    while world.in_flight is not None:
        world.run(frozenset("a"))
    answers = [effect.answer for effect in world.effects if isinstance(effect, Answer)]
    assert answers == [AttemptReturned("b", 1)]
    assert world.ended() == [("b", 1, Outcome.RETURNED), ("a", 1, Outcome.FINISHED)]
    assert not world.engine.held
