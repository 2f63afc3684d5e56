"""Prefill and decode on their own instances: tokens are right, whatever is lost, cut or changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from live_parts import Node
from live_worlds import SOURCE, LiveWorld

from effort import examples
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import Run
from livescale.values.routes import Partner
from livescale.values.types import WorkerRef

_CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)
_REQUESTS_MAX = 10


def roles(
    prefills: int,
    decodes: int,
    *,
    config: BatcherConfig = _CONFIG,
    delays: Sequence[int] = (0,),
    layers: int = 3,
    kv_ahead: bool = True,
) -> tuple[LiveWorld, list[WorkerRef], list[WorkerRef]]:
    """A world of instances that have everything: the first ones run prompts and give what decodes
    to the others."""
    helpers = [config] * (prefills + decodes - 1)
    limits = LiveLimits(answer_ns=100_000, kv_ahead=kv_ahead)
    world = LiveWorld(layers, config, [], limits, delays=delays, gateway_ns=3, helpers=helpers)
    refs = [*world.nodes]
    assert refs[0] == SOURCE
    for ref in refs[:prefills]:
        role(world, ref, refs[prefills:])
    return world, refs[:prefills], refs[prefills:]


def role(
    world: LiveWorld,
    ref: WorkerRef,
    takers: Sequence[WorkerRef],
    keeps: bool = False,
    waits: bool = True,
) -> None:
    """From the next gap between two Runs on, or, unless it `waits`, between two layers of one."""
    node = world.nodes[ref]
    partners = [Partner(t.worker + 1, t) for t in takers]

    def change() -> None:
        if node.live is not None:
            node.live.decode_at(partners, keeps=keeps)

    node.inbox.append((change, lambda: not waits))


def watched(world: LiveWorld, refs: Sequence[WorkerRef]) -> list[Run]:
    """Runs of these instances that compute a token from a token."""
    found: list[Run] = []

    def watch(node: Node, run: Run) -> None:
        if node.ref in refs and any(s.first_position and s.generated_ids for s in run.segments):
            found.append(run)

    world.watch = watch
    return found


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20)), min_size=1, max_size=12),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
@settings(max_examples=examples(100), deadline=None)
def test_prompts_are_computed_at_one_instance_and_decode_at_another(
    prefills: int, decodes: int, sizes: list[tuple[int, int]], delays: list[int]
) -> None:
    world, giving, taking = roles(prefills, decodes, delays=delays)
    decoded = watched(world, giving)
    for number, (prompt, output) in enumerate(sizes):
        at = giving[number % len(giving)]
        prompt_ids = range(number, number + prompt)
        world.at(number * 7, partial(world.request, f"r{number}", at, prompt_ids, output))
    world.play()
    for ref in giving:
        role(world, ref, ())
    world.play()
    world.check_end()
    assert not decoded, "no prefill instance decodes"
    longer = sum(output > 1 for _, output in sizes)
    assert world.moved == longer
    assert bool(longer) is any(world.nodes[ref].runs for ref in taking)


events = st.tuples(
    st.integers(0, 3_000),
    st.sampled_from(("lose", "cut", "refuse", "cancel", "disown", "role", "unified")),
    st.integers(0, 11),
    st.integers(0, 5),
    st.booleans(),
)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=10),
    st.lists(events, max_size=6),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=examples(240), deadline=None)
def test_whatever_happens_tokens_are_right_and_kv_is_freed(
    prefills: int,
    decodes: int,
    sizes: list[tuple[int, int]],
    happens: list[tuple[int, str, int, int, bool]],
    delays: list[int],
    kv_ahead: bool,
) -> None:
    """Losses of either side, links that break for good, peers that are given up though they are
    reached, also while a request is promised, clients that go, requests that are moved, and roles
    that change, at any time. One instance always stays."""
    world, giving, taking = roles(prefills, decodes, delays=delays, kv_ahead=kv_ahead)
    refs = [*giving, *taking]
    for number, (prompt, output) in enumerate(sizes):
        at = giving[number % len(giving)]
        prompt_ids = range(number, number + prompt)
        world.at(number * 7, partial(world.request, f"r{number}", at, prompt_ids, output))
    happen(world, refs, happens)
    end(world)


def end(world: LiveWorld) -> None:
    """A controller would name other decode instances, or none: what was held goes on."""
    world.play()
    for ref in world.nodes:
        role(world, ref, ())
    world.play()
    world.check_end()


def happen(
    world: LiveWorld,
    refs: Sequence[WorkerRef],
    happens: Sequence[tuple[int, str, int, int, bool]],
    loading: Sequence[WorkerRef] = (),
) -> None:
    """Put it all into the world, at its times; the last instance is not lost, and the loads of
    those that load may fail."""
    for at_ns, what, which, other, waits in happens:
        ref, second = refs[which % len(refs)], refs[other % len(refs)]
        if what == "lose" and ref is not refs[-1]:
            world.at(at_ns, partial(world.lose, ref))
        elif what == "cut" and ref is not second:
            world.at(at_ns, partial(world.cut, ref, second))
        elif what == "refuse" and ref is not second:
            world.at(at_ns, partial(world.refuse, ref, second))
        elif what == "cancel":
            world.at(at_ns + 90, partial(cancel, world, f"r{which % _REQUESTS_MAX}"))
        elif what == "disown":
            world.at(at_ns + 90, partial(disown, world, f"r{which % _REQUESTS_MAX}"))
        elif what == "role":
            others = [r for r in refs if r is not ref]
            world.at(at_ns, partial(role, world, ref, others[: 1 + other], bool(which % 2), waits))
        elif what == "unified":
            world.at(at_ns, partial(role, world, ref, (), waits=waits))
        elif what == "fail" and ref in loading:
            world.at(at_ns, partial(world.fail_load, ref))


def cancel(world: LiveWorld, request: str) -> None:
    if request in world.transcripts:
        world.cancel(request)


def disown(world: LiveWorld, request: str) -> None:
    if request in world.transcripts:
        world.disown(request)


def test_without_room_elsewhere_requests_wait_with_their_kv_and_prompts_behind_them() -> None:
    """Two decode instances of 8 blocks: what does not fit stays at the prefill instance, whose own
    blocks bound what it takes in."""
    small = BatcherConfig(8, 4, 64, 16, growth_tokens=4)
    world, (giving,), _ = roles(1, 2, config=small)
    decoded = watched(world, [giving])
    for number in range(12):
        world.request(f"r{number}", giving, range(number, number + 12), 12)
    world.play()
    assert not decoded
    role(world, giving, ())
    world.play()
    world.check_end()


def test_equal_beginnings_of_prompts_are_computed_once_and_their_kv_goes_along() -> None:
    """A prefill instance finds them in its prefix index, also after it gave away what it computed;
    the decode instance gets KV of all of the prompt, of which every value is checked."""
    world, (giving,), _ = roles(1, 1)
    computed: list[Run] = []

    def watch(node: Node, run: Run) -> None:
        if node.ref == giving:
            computed.append(run)

    world.watch = watch
    for number in range(8):
        prompt_ids = [*range(40), number, number]
        world.at(10_000 * number, partial(world.request, f"r{number}", giving, prompt_ids, 6))
    end(world)
    assert world.moved == 8
    first = {run.segments[0].request: run.segments[0].first_position for run in reversed(computed)}
    assert first == {"r0": 0} | {f"r{number}": 40 for number in range(1, 8)}
    tokens = sum(segment.token_count for run in computed for segment in run.segments)
    assert tokens == 42 + 7 * 2


def test_a_decode_instance_that_becomes_a_prefill_one_ends_its_requests_beside_prompts() -> None:
    """What decodes there stays, to its end; prompts are computed there at once, and what they begin
    decodes at the instance that is left."""
    world, (giving,), (mutated, left) = roles(1, 2)
    decoded: list[str] = []

    def watch(node: Node, run: Run) -> None:
        if node.ref == mutated:
            decoded.extend(s.request for s in run.segments if s.first_position >= 12)

    world.watch = watch
    for number in range(8):
        world.request(f"r{number}", giving, range(number, number + 12), 30)
    while not decoded:
        world.play_one()
    staying = {*decoded}
    role(world, giving, [left])
    role(world, mutated, [left], keeps=True)
    prompts_ns: list[int] = []

    def also(node: Node, run: Run) -> None:
        watch(node, run)
        if node.ref == mutated and any(s.request in ("r8", "r9") for s in run.segments):
            prompts_ns.append(world.now_ns)

    world.watch = also
    for number in range(8, 10):
        world.request(f"r{number}", mutated, range(number, number + 12), 30)
    world.play()
    assert not {"r8", "r9"} & {*decoded}, "what begins here decodes elsewhere"
    counts = {request: decoded.count(request) for request in staying}
    assert set(counts.values()) == {29}, "to their last token: the first one came with the prompt"
    ended_ns = min(world.transcripts[request].finished_ns for request in staying)
    assert min(prompts_ns) < ended_ns, "prompts do not wait for them"
    end(world)
