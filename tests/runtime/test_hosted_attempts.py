"""What a worker says of attempts that move: to whom, and what it remembers of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.batcher import Batcher, BatcherConfig
from livescale.batching.live_batch import LiveLimits
from livescale.batching.live_batcher import LiveBatcher
from livescale.messages.events import RequestEnded
from livescale.runtime.hosted_attempts import HostedAttempts
from livescale.runtime.wire import AttemptReturned, AttemptTaken, FromTokenServer, Submit
from livescale.types import LayerSpan, Outcome, SamplingParams, WorkerRef

OWN = WorkerRef(0)
LONG_NS = 10**15


class HeardWords:
    """A Reporter that keeps everything."""

    def __init__(self) -> None:
        self.controller: list[object] = []
        self.gateways: list[tuple[str, FromTokenServer]] = []

    def to_controller(self, event: object) -> None:
        self.controller.append(event)

    def to_gateway(self, gateway: str, message: FromTokenServer) -> None:
        self.gateways.append((gateway, message))


def returned(attempts: list[tuple[str, int]]) -> list[RequestEnded]:
    return [RequestEnded(r, n, Outcome.RETURNED, 0, OWN) for r, n in attempts]


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=12))
def test_what_a_lost_partner_took_is_given_back_once(story: list[tuple[int, bool]]) -> None:
    """Each step either loses a partner or lets it take one more attempt."""
    words = HeardWords()
    hosted = HostedAttempts(OWN, words, LONG_NS)
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
            hosted.taken(request, step, f"g{request}")
            assert words.gateways == [(f"g{request}", AttemptTaken(request, step))]
            hosted.given(WorkerRef(partner), [(request, step)])
            assert hosted.gateway_of(request) == ""
            given[partner].append((request, step))


def test_what_came_back_is_not_returned_with_the_partner_that_had_it() -> None:
    words, peer = HeardWords(), WorkerRef(1)
    hosted = HostedAttempts(OWN, words, LONG_NS)
    hosted.taken("r", 1, "g0")
    hosted.given(peer, [("r", 1)])
    hosted.taken("r", 1, "g0", moves=2)
    hosted.partner_lost(peer)
    assert words.controller == []
    assert hosted.gateway_of("r") == "g0"


def test_what_was_given_is_remembered_for_a_time_only() -> None:
    words, peer = HeardWords(), WorkerRef(1)
    hosted = HostedAttempts(OWN, words, telling_ns=0)
    hosted.taken("r", 1, "g0")
    hosted.given(peer, [("r", 1)])
    hosted.partner_lost(peer)
    assert words.controller == []


def test_of_very_many_attempts_the_last_ones_are_remembered() -> None:
    words, peer, count = HeardWords(), WorkerRef(1), 5000
    hosted = HostedAttempts(OWN, words, LONG_NS)
    for number in range(count):
        hosted.taken(f"r{number}", 1, "g0")
        hosted.given(peer, [(f"r{number}", 1)])
    hosted.partner_lost(peer)
    kept = len(words.controller)
    assert 0 < kept < count
    assert words.controller == returned([(f"r{n}", 1) for n in range(count - kept, count)])


def test_an_attempt_of_a_gateway_that_nobody_knows_goes_back_to_the_controller() -> None:
    words = HeardWords()
    hosted = HostedAttempts(OWN, words, LONG_NS)
    batcher = Batcher(BatcherConfig(8, 16, 64, 8), LayerSpan(0, 4))
    live = LiveBatcher(batcher, 1, LiveLimits())
    live.layers_arrived(4)
    hosted.open(1, live)
    for request in ("r", "s"):
        hosted.submit("g0", Submit(request, 1, 1, (5, 6), (), SamplingParams(3)))
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
