"""KV goes ahead of its request: what is sent when, and what becomes of promises."""

from __future__ import annotations

import pytest
from live_worlds import LiveWorld
from test_decode_giver import role

from livescale.batching.contract import live_messages as messages
from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.values.types import WorkerRef

LAYERS, PROMPT, LAYER_NS = 5, 20, 200
CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)
GIVER, FIRST, SECOND = WorkerRef(0), WorkerRef(1), WorkerRef(2)


class Witness(LiveWorld):
    """Notes what is sent, and when."""

    def __init__(self, decodes: int = 1, *, delay_ns: int = 3, kv_ahead: bool = True) -> None:
        limits = LiveLimits(answer_ns=100_000, kv_ahead=kv_ahead)
        delays = (delay_ns,)
        super().__init__(
            LAYERS, CONFIG, [], limits, delays=delays, gateway_ns=3, helpers=[CONFIG] * decodes
        )
        self.sent: list[tuple[int, WorkerRef, WorkerRef, LiveMessage]] = []
        role(self, GIVER, [FIRST, SECOND][:decodes])
        self.play()

    def _send(self, ref: WorkerRef, peer: WorkerRef, message: LiveMessage, payload: object) -> None:
        self.sent.append((self.now_ns, ref, peer, message))
        super()._send(ref, peer, message, payload)  # type: ignore[arg-type]

    def times(self, kind: type[LiveMessage], peer: WorkerRef | None = None) -> list[int]:
        """When the giver sent such messages."""
        return [
            at_ns
            for at_ns, ref, to, message in self.sent
            if ref == GIVER and isinstance(message, kind) and peer in (None, to)
        ]

    def end(self) -> None:
        role(self, GIVER, ())
        self.play()
        self.check_end()


def test_kv_of_each_layer_goes_when_that_is_done() -> None:
    world = Witness()
    world.request("r", GIVER, range(PROMPT), 5)
    began_ns = world.now_ns + 3
    world.play()
    (promised_ns,), (handed_ns,) = world.times(messages.Promised), world.times(messages.Handover)
    # The offer and the pull take 6; then the first layer is over.
    assert promised_ns == began_ns + LAYER_NS
    assert handed_ns == began_ns + LAYERS * LAYER_NS
    ends = [began_ns + layer * LAYER_NS for layer in range(1, LAYERS + 1)]
    assert world.times(messages.KvLayer) == ends
    world.end()


def test_without_it_kv_follows_the_request() -> None:
    world = Witness(kv_ahead=False)
    world.request("r", GIVER, range(PROMPT), 5)
    world.play()
    (handed_ns,) = world.times(messages.Handover)
    assert not world.times(messages.Promised)
    assert world.times(messages.KvLayer) == [handed_ns] * LAYERS
    world.end()


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_request_that_ends_with_its_first_token_is_offered_to_none(outputs: int) -> None:
    world = Witness()
    world.request("r", GIVER, range(PROMPT), outputs)
    world.play()
    assert bool(world.times(messages.Offer)) is (outputs > 1)
    world.end()


def test_only_one_is_promised_the_request() -> None:
    world = Witness(decodes=2)
    world.request("r", GIVER, range(PROMPT), 5)
    world.play()
    assert len(world.times(messages.Promised)) == 1
    assert len(world.times(messages.KvLayer)) == LAYERS
    # The pull of the other one comes too late, or what it was offered is withdrawn.
    assert len(world.times(messages.Offer)) + len(world.times(messages.Gone)) >= 3
    world.end()


def test_a_request_that_is_cancelled_while_its_kv_travels_leaves_nothing() -> None:
    world = Witness()
    world.request("r", GIVER, range(PROMPT), 5)
    world.at(world.now_ns + 2 * LAYER_NS, lambda: world.cancel("r"))
    world.play()
    assert len(world.times(messages.KvLayer)) >= 2
    assert len(world.times(messages.Gone)) == 1
    assert not world.times(messages.Handover)
    world.end()


def test_where_the_promised_one_is_lost_the_other_gets_the_request() -> None:
    world = Witness(decodes=2)
    world.request("r", GIVER, range(PROMPT), 5)
    began_ns = world.now_ns
    while not world.times(messages.KvLayer):
        world.play_one()
    (lost,) = [w for w in (FIRST, SECOND) if world.times(messages.Promised, w)]
    world.lose(lost)
    world.play()
    (handed_ns,) = world.times(messages.Handover)
    assert handed_ns >= began_ns + LAYERS * LAYER_NS
    assert not world.times(messages.Handover, lost)
    world.end()


def test_a_promise_ends_where_the_taker_is_no_decode_instance_any_more() -> None:
    world = Witness(decodes=2)
    world.request("r", GIVER, range(PROMPT), 5)
    while not world.times(messages.Promised):
        world.play_one()
    (promised,) = [w for w in (FIRST, SECOND) if world.times(messages.Promised, w)]
    other = FIRST if promised == SECOND else SECOND
    role(world, GIVER, [other])
    world.play()
    assert not world.times(messages.Handover, promised)
    assert len(world.times(messages.Handover, other)) == 1
    world.end()


def test_one_that_is_given_up_though_it_is_reached_learns_that_nothing_comes() -> None:
    """Its blocks are free before the request, which decodes elsewhere, has ended."""
    world = Witness(decodes=2)
    world.request("r", GIVER, range(PROMPT), 5)
    while not world.times(messages.Promised):
        world.play_one()
    (promised,) = [w for w in (FIRST, SECOND) if world.times(messages.Promised, w)]
    world.refuse(GIVER, promised)
    world.play()
    assert len(world.times(messages.Gone, promised)) == 1
    assert not world.times(messages.Handover, promised)
    world.end()


def test_kv_that_was_wanted_ahead_and_was_not_there_comes_behind_the_request() -> None:
    """The pull comes so late that the prompt is computed."""
    world = Witness(delay_ns=LAYERS * LAYER_NS)
    world.request("r", GIVER, range(PROMPT), 5)
    world.play()
    (handed_ns,) = world.times(messages.Handover)
    assert all(at_ns >= handed_ns for at_ns in world.times(messages.KvLayer))
    world.end()
