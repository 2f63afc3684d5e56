"""Live pairs in every order of events: whatever happens, every request ends right, and once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_parts import Target
from live_worlds import LiveWorld
from msgspec import structs

from effort import examples
from livescale.batching.contract.live_order import LIVE_ORDERS
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.values.types import WorkerRef

_BLOCK_TOKENS = 2
_orders = st.sampled_from(["zigzag"] * len(LIVE_ORDERS) + sorted(LIVE_ORDERS))


@dataclass(frozen=True)
class Arrival:
    """A request that comes to some node, and what else happens to it."""

    at_ns: int
    node: int
    tokens: int
    outputs: int
    salt: str = ""
    cancel_ns: int | None = None
    move_ns: int | None = None


@dataclass(frozen=True)
class Story:
    """All that a world is made of."""

    layers: int
    configs: tuple[BatcherConfig, ...]
    orders: tuple[str, ...]
    has_source: tuple[bool, ...]
    layer_gaps_ns: tuple[tuple[int, ...], ...]
    limits: LiveLimits
    arrivals: tuple[Arrival, ...]
    delays_ns: tuple[int, ...]
    gateway_ns: int
    run_ns: int
    helpers: tuple[BatcherConfig, ...] = ()
    knows_rate: bool = False
    losses: tuple[tuple[str, int, int], ...] = ()


_times = st.integers(0, 600)
_soon = st.sampled_from([0, 0, 0, 10, 40]) | st.integers(0, 300)


@st.composite
def _configs(draw: st.DrawFn) -> BatcherConfig:
    sequences_max = draw(st.integers(1, 5) | st.just(16))
    return BatcherConfig(
        kv_blocks=draw(st.integers(4, 12) | st.integers(12, 40)),
        block_tokens=_BLOCK_TOKENS,
        run_tokens_max=sequences_max + draw(st.integers(0, 10)),
        sequences_max=sequences_max,
        growth_tokens=draw(st.integers(0, 4)),
    )


@st.composite
def _arrivals(draw: st.DrawFn, nodes: int, room: int, *, is_calm: bool) -> Arrival:
    tokens = draw(st.integers(1, 6))
    outputs = st.integers(1, 4 if tokens < 5 else 2)
    return Arrival(
        draw(_soon),
        draw(st.sampled_from([1, 1, 1, nodes - 1, 0])),
        tokens,
        draw(outputs | st.integers(1, min(room + 1 - tokens, 25))),
        draw(st.sampled_from(["", "", "other"])),
        None if is_calm else draw(st.none() | _times),
        None if is_calm else draw(st.none() | st.none() | _times),
    )


@st.composite
def stories(draw: st.DrawFn, *, is_calm: bool = False) -> Story:
    targets = draw(st.integers(1, 2))
    layers = draw(st.integers(1, 6))
    gaps = st.tuples(*[st.sampled_from([100, 20, 300, 0])] * (layers + 2))
    configs = tuple(draw(_configs()) for _ in range(targets + 1))
    helpers = tuple(draw(_configs()) for _ in range(draw(st.sampled_from([0, 0, 1, 2]))))
    room = min(config.kv_blocks for config in configs + helpers) * _BLOCK_TOKENS
    arrivals = _arrivals(targets + 1, room, is_calm=is_calm)
    nodes = targets + len(helpers)
    losses = st.tuples(st.sampled_from(["lose", "cut", "fail"]), st.integers(0, nodes), _times)
    delays = draw(st.sampled_from([st.integers(0, 60), st.integers(100, 400)]))
    return Story(
        layers,
        configs,
        tuple(draw(_orders) for _ in range(targets)),
        tuple(draw(st.sampled_from([True, True, True, False])) for _ in range(targets)),
        tuple(draw(gaps) for _ in range(targets)),
        LiveLimits(
            batches_max=draw(st.integers(1, 4)),
            batch_tokens_max=draw(st.integers(1, 12)),
            span_ns=draw(st.sampled_from([1, 40, 100, 10_000])),
            gap_ns=draw(st.sampled_from([1, 40, 100, 10_000])),
            kv_layers_ahead=draw(st.integers(1, 3)),
            answer_ns=draw(
                st.sampled_from([10_000, 10_000, 150, 10] if not is_calm else [100_000])
            ),
            move_factor=draw(st.sampled_from([1, 0, 3])),
            pulls_max=draw(st.integers(1, 3)),
        ),
        tuple(draw(st.lists(arrivals, min_size=4, max_size=12))),
        (0,) if is_calm else tuple(draw(st.lists(delays, min_size=1, max_size=4))),
        0 if is_calm else draw(st.sampled_from([0, 3, 50])),
        draw(st.sampled_from([10, 0])),
        helpers,
        draw(st.booleans()),
        () if is_calm else tuple(draw(st.lists(losses, max_size=2))),
    )


def world_of(story: Story) -> LiveWorld:
    targets = []
    for number, gaps in enumerate(story.layer_gaps_ns):
        layer_ns = tuple(sum(gaps[: index + 1]) for index in range(len(gaps)))
        config = story.configs[number + 1]
        targets.append(Target(layer_ns, config, story.orders[number], story.has_source[number]))
    world = LiveWorld(
        story.layers,
        story.configs[0],
        targets,
        story.limits,
        delays=story.delays_ns,
        gateway_ns=story.gateway_ns,
        run_ns=story.run_ns,
        helpers=story.helpers,
        knows_rate=story.knows_rate,
    )
    configs = story.configs + story.helpers
    room = min(config.kv_blocks for config in configs) * _BLOCK_TOKENS
    for number, arrival in enumerate(story.arrivals):
        request = f"r{number}"
        # Whoever gets it could hold it alone.
        assert arrival.tokens + arrival.outputs - 1 <= room
        prompt = [*range(arrival.tokens - 1), number % 3]
        world.at(
            arrival.at_ns,
            lambda a=arrival, r=request, p=prompt: world.request(
                r, WorkerRef(a.node), p, a.outputs, a.salt, (0,) if a.salt else ()
            ),
        )
        if arrival.cancel_ns is not None:
            world.at(arrival.at_ns + arrival.cancel_ns, lambda r=request: world.cancel(r))
        if arrival.move_ns is not None:
            world.at(arrival.at_ns + arrival.move_ns, lambda r=request: world.disown(r))
    for kind, node, at_ns in story.losses:
        ref = WorkerRef(node)
        if kind == "lose":
            world.at(at_ns, lambda ref=ref: world.lose(ref))
        elif kind == "fail":
            world.at(at_ns, lambda ref=ref: world.fail_load(ref))
        elif ref not in world.sources:
            world.at(at_ns, lambda ref=ref: world.cut(world.sources[-1], ref))
    return world


@settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(stories())
def test_whatever_happens_every_request_ends_right(story: Story) -> None:
    world = world_of(story)
    world.play()
    world.check_end()


@st.composite
def crowded_stories(draw: st.DrawFn) -> Story:
    """The source has many requests with much to generate, and targets are there soon."""
    story = draw(stories())
    blocks = draw(st.integers(20, 90))
    config = BatcherConfig(blocks, _BLOCK_TOKENS, 32, 16, growth_tokens=draw(st.integers(0, 8)))
    arrivals = st.builds(
        Arrival,
        at_ns=st.integers(0, 100),
        node=st.sampled_from([0, 0, 0, 1]),
        tokens=st.integers(1, 4),
        outputs=st.integers(10, 37),
        salt=st.sampled_from(["", "", "", "other"]),
        cancel_ns=st.none() | st.none() | st.integers(0, 3_000),
        move_ns=st.none() | st.none() | st.none() | st.integers(0, 3_000),
    )
    nodes = len(story.configs)
    losses = st.tuples(
        st.sampled_from(["lose", "cut", "fail"]), st.integers(0, nodes - 1), st.integers(0, 3_000)
    )
    return replace(
        story,
        configs=(config,) * nodes,
        helpers=(config,) * len(story.helpers),
        has_source=(True,) * (nodes - 1),
        layer_gaps_ns=tuple(
            (draw(st.sampled_from([1, 20])),) * len(g) for g in story.layer_gaps_ns
        ),
        limits=structs.replace(story.limits, move_factor=1),
        arrivals=tuple(draw(st.lists(arrivals, min_size=6, max_size=12))),
        losses=tuple(draw(st.lists(losses, max_size=1))),
        run_ns=draw(st.sampled_from([100, 30])),
    )


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(crowded_stories())
def test_requests_that_move_end_right(story: Story) -> None:
    world = world_of(story)
    world.play()
    world.check_end()


@st.composite
def slow_stories(draw: st.DrawFn) -> Story:
    """Links are slow beside what instances compute: sources have several pulls under way, and take
    batches without their rows."""
    story = draw(stories())
    config = BatcherConfig(400, _BLOCK_TOKENS, 32, 32)
    arrivals = st.builds(
        Arrival,
        at_ns=st.integers(0, 50),
        node=st.just(1),
        tokens=st.integers(1, 4),
        outputs=st.integers(1, 5),
        cancel_ns=st.none() | st.none() | _times,
        move_ns=st.none() | st.none() | _times,
    )
    return replace(
        story,
        configs=(config,) * len(story.configs),
        helpers=(config,) * len(story.helpers),
        has_source=(True,) * len(story.has_source),
        orders=("zigzag",) * len(story.orders),
        limits=structs.replace(story.limits, batches_max=16, batch_tokens_max=4),
        arrivals=tuple(draw(st.lists(arrivals, min_size=8, max_size=16))),
        delays_ns=tuple(draw(st.lists(st.integers(100, 300), min_size=1, max_size=4))),
        knows_rate=True,
    )


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(slow_stories())
def test_several_pulls_under_way_end_right(story: Story) -> None:
    world = world_of(story)
    world.play()
    world.check_end()


@settings(max_examples=examples(100))
@given(stories(is_calm=True))
def test_a_free_source_takes_what_it_can_have(story: Story) -> None:
    world = world_of(story)
    world.is_strict = True
    world.play()
    world.check_end()
