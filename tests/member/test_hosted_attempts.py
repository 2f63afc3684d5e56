"""What a worker says of attempts that move: to whom, and what it remembers of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, SequenceSpec
from livescale.member.attempts import HostedAttempts
from livescale.member.effects import Answer, Effect, Report
from livescale.messages.attempts import (
    AttemptReturned,
    AttemptTaken,
)
from livescale.messages.events import RequestEnded
from livescale.values.types import FinishReason, LayerSpan, Outcome, SamplingParams, WorkerRef

OWN = WorkerRef(0)


class Effects:
    """Keeps what a worker asks for, by receiver."""

    def __init__(self) -> None:
        self.controller: list[object] = []
        self.gateways: list[tuple[str, object]] = []

    def emit(self, effect: Effect) -> None:
        if isinstance(effect, Report):
            self.controller.append(effect.event)
        elif isinstance(effect, Answer):
            self.gateways.append((effect.gateway, effect.answer))


def spec(request: str, attempt: int, moves: int = 1) -> SequenceSpec:
    return SequenceSpec(request, attempt, (5, 6), SamplingParams(3), moves=moves)


def returned(attempts: list[tuple[str, int]]) -> list[RequestEnded]:
    return [RequestEnded(r, n, Outcome.RETURNED, 0, OWN) for r, n in attempts]


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=12))
def test_what_a_lost_partner_took_is_given_back_once(story: list[tuple[int, bool]]) -> None:
    """Each step either loses a partner or lets it take one more attempt."""
    words = Effects()
    hosted = HostedAttempts(OWN, words.emit)
    given: dict[int, list[tuple[str, int]]] = {1: [], 2: [], 3: []}
    for step, (partner, is_lost) in enumerate(story):
        words.controller, words.gateways = [], []
        if is_lost:
            hosted.partner_lost(WorkerRef(partner))
            assert words.controller == returned(given[partner])
            back = [(f"g{r}", AttemptReturned(r, n)) for r, n in given[partner]]
            assert words.gateways == back
            given[partner] = []
        else:
            request = f"r{step}"
            hosted.taken(f"g{request}", spec(request, step), is_decoding=False)
            assert words.gateways == [(f"g{request}", AttemptTaken(request, step))]
            hosted.given(WorkerRef(partner), [(request, step)])
            assert hosted.gateway_of(request) == ""
            given[partner].append((request, step))


def test_what_came_back_is_not_returned_with_the_partner_that_had_it() -> None:
    words, peer = Effects(), WorkerRef(1)
    hosted = HostedAttempts(OWN, words.emit)
    hosted.taken("g0", spec("r", 1), is_decoding=False)
    hosted.given(peer, [("r", 1)])
    hosted.taken("g0", spec("r", 1, moves=2), is_decoding=False)
    hosted.partner_lost(peer)
    assert words.controller == []
    assert hosted.gateway_of("r") == "g0"


def test_of_very_many_attempts_the_last_ones_are_remembered() -> None:
    words, peer, count = Effects(), WorkerRef(1), 5000
    hosted = HostedAttempts(OWN, words.emit)
    for number in range(count):
        hosted.taken("g0", spec(f"r{number}", 1), is_decoding=False)
        hosted.given(peer, [(f"r{number}", 1)])
    hosted.partner_lost(peer)
    kept = len(words.controller)
    assert 0 < kept < count
    assert words.controller == returned([(f"r{n}", 1) for n in range(count - kept, count)])


def test_an_attempt_of_a_gateway_that_nobody_knows_goes_back_to_the_controller() -> None:
    words = Effects()
    hosted = HostedAttempts(OWN, words.emit)
    batcher = Batcher(BatcherConfig(8, 16, 64, 8), LayerSpan(0, 4))
    live = LiveBatcher(batcher, 1, LiveLimits())
    live.layers_arrived(4)
    hosted.open(1, live)
    for request in ("r", "s"):
        hosted.submit("g0", 1, spec(request, 1))
    hosted.gateway_unknown("g1", "r", 1)  # another gateway's, meanwhile
    hosted.gateway_unknown("g0", "r", 2)  # another attempt
    assert live.requests() == [("r", 1), ("s", 1)]
    assert words.controller == []
    hosted.gateway_unknown("g0", "r", 1)
    assert words.controller == returned([("r", 1)])
    assert live.requests() == [("s", 1)]
    hosted.gateway_unknown("g0", "r", 1)
    assert words.controller == returned([("r", 1)])
    live.validate()


def test_a_new_controller_is_told_what_was_taken_and_given_back_without_a_gateway() -> None:
    """Neither the gateway nor the controller of then may have received that."""
    words = Effects()
    hosted = HostedAttempts(OWN, words.emit)
    live = LiveBatcher(Batcher(BatcherConfig(8, 4, 8, 4), LayerSpan(0, 4)), 1, LiveLimits())
    hosted.open(1, live)
    for request, moves in (("moved", 2), ("own", 0)):
        live.add(spec(request, 1, moves))
        hosted.taken("g", spec(request, 1, moves), is_decoding=False)
        hosted.gateway_unknown("g", request, 1)
    ended = [RequestEnded(r, 1, Outcome.RETURNED, 0, OWN, n) for r, n in (("moved", 2), ("own", 0))]
    assert words.controller == ended
    words.controller = []
    hosted.met_controller()
    assert words.controller == ended[:1]


@given(moves=st.integers(0, 3), is_one=st.booleans(), is_this=st.booleans())
def test_what_ends_in_a_run_while_its_gateway_is_cut_off_is_to_run_elsewhere(
    moves: int, is_one: bool, is_this: bool
) -> None:
    """Its gateway may not know that the attempt was taken over, and would wait for the worker
    before. News of an older attempt (not `is_this`) says nothing of this one."""
    words = Effects()
    hosted = HostedAttempts(OWN, words.emit)
    live = LiveBatcher(Batcher(BatcherConfig(8, 4, 8, 4), LayerSpan(0, 4)), 1, LiveLimits())
    hosted.open(1, live)
    live.add(spec("r", 2, moves))
    hosted.taken("g", spec("r", 2, moves), is_decoding=False)
    if is_one:
        hosted.cut_off("g", "r", 2 if is_this else 1)
    else:
        hosted.cut_off_all("g" if is_this else "another")
    hosted.emitted([EmittedTokens("r", 2, 0, (5, 6, 7), FinishReason.LENGTH)])
    is_returned = is_this and moves > 0
    ended = RequestEnded("r", 2, Outcome.FINISHED, 3, OWN)
    if is_returned:
        ended = RequestEnded("r", 2, Outcome.RETURNED, 0, OWN, moves)
    assert words.controller == [ended]
    hosted.met_controller()
    assert words.controller == ([ended, ended] if is_returned else [ended])
