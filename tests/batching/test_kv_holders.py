"""A live pair whose requests decode at a third instance: KV goes there from where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from live_parts import Target
from live_worlds import LiveWorld
from test_decode_giver import end, happen, role

from effort import examples
from livescale.batching.contract.live_messages import (
    Handover,
    KvAt,
    KvLayer,
    LiveMessage,
    Offer,
    PartOf,
    Settled,
    UnexpectedMessage,
)
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams, WorkerRef

CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)
LAYERS = 8


def world_of(
    targets: int,
    sources: int,
    decodes: int,
    *,
    layer_gap_ns: int,
    layers: int = LAYERS,
    delays: Sequence[int] = (5,),
    kv_straight: bool = True,
) -> tuple[LiveWorld, list[WorkerRef], list[WorkerRef], list[WorkerRef]]:
    """Targets that load, sources that pull from them, and instances that decode what any of both
    has computed."""
    ready_ns = tuple(layer_gap_ns * (n + 1) for n in range(layers + 2))
    loading = Target(ready_ns, CONFIG)
    whole = Target((0,) * (layers + 2), CONFIG, has_source=False)
    limits = LiveLimits(answer_ns=100_000, kv_straight=kv_straight)
    world = LiveWorld(
        layers,
        CONFIG,
        [*[loading] * targets, *[whole] * decodes],
        limits,
        delays=delays,
        gateway_ns=3,
        helpers=[CONFIG] * (sources - 1),
    )
    refs = [*world.nodes]
    loading_refs = refs[1 : 1 + targets]
    decoding = refs[1 + targets : 1 + targets + decodes]
    for ref in (*world.sources, *loading_refs):
        role(world, ref, decoding)
    return world, loading_refs, [*world.sources], decoding


@pytest.mark.parametrize("layer_gap_ns", [300, 600, 1000])
@pytest.mark.parametrize("kv_straight", [True, False])
def test_kv_of_each_layer_crosses_one_link(layer_gap_ns: int, kv_straight: bool) -> None:
    """The rule of `test_route_table.py`, as bytes that move: without `kv_straight` the first
    layers' KV goes by way of the source."""
    world, (target,), (source,), (decode,) = world_of(
        1, 1, 1, layer_gap_ns=layer_gap_ns, kv_straight=kv_straight
    )
    moves = kv_by_request(world)
    for number in range(11):
        at = source if number < 5 else target
        prompt_ids = range(20 * number, 20 * number + 20)
        world.at(number * 7, partial(world.request, f"r{number}", at, prompt_ids, 6))
    end(world)
    assert len(moves) == 11
    cuts = []
    for of in moves.values():
        first = of.get((target, decode), [])
        rest = of.get((source, decode), [])
        assert sorted(first + rest) == [*range(1, LAYERS + 1)]
        detour = of.get((target, source), [])
        if 0 < len(first) < LAYERS:
            assert first == [*range(1, len(first) + 1)]
        cuts += [len(first), len(detour)]
        assert set(of) <= {(target, decode), (source, decode), (target, source)}
        assert not (kv_straight and detour)
        assert kv_straight or len(first) in (0, LAYERS)
    assert any(0 < cut < LAYERS for cut in cuts), "a batch changed hands half-way"


events = st.tuples(
    st.integers(0, 6_000),
    st.sampled_from(("lose", "cut", "cancel", "disown", "role", "unified", "fail")),
    st.integers(0, 11),
    st.integers(0, 5),
    st.booleans(),
)


@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(100, 800),
    st.lists(st.tuples(st.integers(5, 60), st.integers(1, 20)), min_size=5, max_size=14),
    st.lists(events, max_size=6),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.integers(0, 3),
)
@settings(max_examples=examples(100), deadline=None)
def test_whatever_happens_tokens_are_right_and_kv_is_freed(
    targets: int,
    sources: int,
    decodes: int,
    layer_gap_ns: int,
    sizes: list[tuple[int, int]],
    happens: list[tuple[int, str, int, int, bool]],
    delays: list[int],
    logprobs_at: int,
) -> None:
    """Any of the three instances is lost, a link between two of them is, the load fails, clients
    go, and roles change, at any time. One instance always stays."""
    world, loading, pulling, decoding = world_of(
        targets, sources, decodes, layer_gap_ns=layer_gap_ns, layers=4, delays=delays
    )
    kv_at = holders_named(world)
    refs = [*loading, *decoding, *pulling]
    for number, (prompt, output) in enumerate(sizes):
        at = (loading + pulling)[number % (targets + sources)]
        prompt_ids = range(number, number + prompt)
        # Where logprobs are wanted the request stays, and needs its KV there.
        logprobs = 1 if number % 4 == logprobs_at else None
        ask = partial(world.request, f"r{number}", at, prompt_ids, output, logprobs=logprobs)
        world.at(number * 7, ask)
    happen(world, refs, happens, loading)
    end(world)
    event(f"requests with KV at two holders: {min(len(kv_at), 2)}")


def holders_named(world: LiveWorld) -> list[Handover]:
    """Batches that are handed over with the names of others who have KV, from now on."""
    found: list[Handover] = []

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        if isinstance(message, Handover) and message.kv_at:
            found.append(message)

    world.listen = listen
    return found


@pytest.mark.parametrize("lost", ["target", "source"])
def test_a_holder_that_is_lost_costs_one_computation(lost: str) -> None:
    """The decode instance has the request, and not yet the KV: the prompt is computed anew."""
    world, (target,), (source,), _ = world_of(1, 1, 1, layer_gap_ns=600)
    lose = {"target": target, "source": source}[lost]
    seen: list[Handover] = []

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        if isinstance(message, Handover) and message.kv_at and not seen:
            seen.append(message)
            world.at(world.now_ns + 7, partial(world.lose, lose))

    world.listen = listen
    for number in range(11):
        at = source if number < 5 else target
        prompt_ids = range(20 * number, 20 * number + 20)
        world.at(number * 7, partial(world.request, f"r{number}", at, prompt_ids, 6))
    end(world)
    assert seen


def test_the_target_keeps_a_batch_until_the_last_of_its_requests_has_its_kv() -> None:
    world, (target,), (source,), _ = world_of(1, 1, 1, layer_gap_ns=600)
    lent: dict[BatchKey, dict[BatchKey, None]] = {}
    settled: dict[BatchKey, int] = {}

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        if isinstance(message, Handover) and message.kv_at:
            lent.setdefault(message.kv_at[0].part.batch, {})[message.batch] = None
        elif isinstance(message, Settled):
            settled[message.batch] = len(settled)

    world.listen = listen
    for number in range(11):
        at = source if number < 5 else target
        prompt_ids = range(20 * number, 20 * number + 20)
        world.at(number * 7, partial(world.request, f"r{number}", at, prompt_ids, 6))
    end(world)
    assert lent
    for whole, parts in lent.items():
        assert all(settled[part] < settled[whole] for part in parts)


@pytest.mark.parametrize(
    ("spans", "decoding", "requests"),
    [
        ([LayerSpan(0, 2)], True, 1),
        ([LayerSpan(2, LAYERS + 2)], True, 1),
        ([LayerSpan(1, 3), LayerSpan(2, 4)], True, 1),
        ([LayerSpan(1, 3)], False, 1),
        ([LayerSpan(1, 3)], True, 2),
    ],
)
def test_holders_that_cannot_be_are_refused(
    spans: list[LayerSpan], decoding: bool, requests: int
) -> None:
    world, _, (source,), (decode,) = world_of(1, 1, 1, layer_gap_ns=600)
    world.play()
    live = world.nodes[decode].live
    assert live is not None
    key = BatchKey(1, 1)
    live.take_message(source, Offer(live.instance, key, (4,) * requests, (9,) * requests, True), 0)
    live.take_outbox(0)
    sampling = SamplingParams(output_tokens_max=7)
    specs = tuple(
        SequenceSpec(f"r{n}", 1, (1, 2, 3), sampling, generated_ids=(4,)) for n in range(requests)
    )
    kv_at = tuple(KvAt(source, span, PartOf(BatchKey(2, 1), "r0")) for span in spans)
    stop = LAYERS + 2 if decoding else 2
    with pytest.raises(UnexpectedMessage):
        live.expected_tokens(source, Handover(key, specs, stop, decoding, kv_at=kv_at))


def kv_by_request(world: LiveWorld) -> dict[str, dict[tuple[WorkerRef, WorkerRef], list[int]]]:
    """By request, in order: from which instance to which KV of which layers goes, from now on."""
    found: dict[str, dict[tuple[WorkerRef, WorkerRef], list[int]]] = {}
    requests: dict[BatchKey, list[str]] = {}
    #: KV may come before its request
    ahead: dict[BatchKey, list[int]] = {}

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        layers: list[int] = []
        if isinstance(message, Handover):
            requests[message.batch] = [spec.request for spec in message.requests]
            layers = ahead.pop(message.batch, [])
        elif isinstance(message, KvLayer) and message.batch in requests:
            layers = [message.layer]
        elif isinstance(message, KvLayer):
            ahead.setdefault(message.batch, []).append(message.layer)
        if layers:
            assert isinstance(message, Handover | KvLayer)
            for request in requests[message.batch]:
                moves = found.setdefault(request, {})
                moves.setdefault((sender, receiver), []).extend(layers)

    world.listen = listen
    return found
