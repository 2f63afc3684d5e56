"""Instances that get another role while they compute prompts: between two layers of a Run."""

from __future__ import annotations

from functools import partial

from hypothesis import event, given, settings
from hypothesis import strategies as st
from live_worlds import LiveWorld
from test_decode_giver import role
from test_early_offers import FIRST, GIVER, LAYER_NS, LAYERS, PROMPT, SECOND, Witness

from effort import examples
from livescale.batching.contract import live_messages as messages
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.values.types import WorkerRef

CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)


class RoleWorld(LiveWorld):
    """Instances of which some prefill and some decode, as a controller keeps them: those that
    prefill give to all that decode, and do both where there are none."""

    def __init__(self, instances: int, prefills: int, delays: list[int], kv_ahead: bool) -> None:
        helpers = [CONFIG] * (instances - 1)
        limits = LiveLimits(answer_ns=100_000, kv_ahead=kv_ahead)
        super().__init__(LAYERS, CONFIG, [], limits, delays=delays, gateway_ns=3, helpers=helpers)
        self.refs = [*self.nodes]
        self.prefilling = dict.fromkeys(self.refs[:prefills])
        #: orders that came while a Run was in flight
        self.early_orders = 0
        self.tell_all()

    def flip(self, ref: WorkerRef) -> None:
        """A mutation."""
        keeps = ref not in self.prefilling
        if keeps:
            self.prefilling[ref] = None
        else:
            del self.prefilling[ref]
        self.early_orders += self.nodes[ref].run is not None
        self.tell_all(ref if keeps else None)

    def tell_all(self, keeping: WorkerRef | None = None) -> None:
        decoding = [ref for ref in self.refs if ref not in self.prefilling]
        for ref in self.refs:
            takers = decoding if ref in self.prefilling else []
            role(self, ref, takers, ref == keeping, waits=False)


@given(
    st.integers(2, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 6_000), st.integers(0, 3)), min_size=1, max_size=8),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=examples(240), deadline=None)
def test_tokens_are_right_whatever_role_changes_when(
    instances: int,
    prefills: int,
    sizes: list[tuple[int, int]],
    flips: list[tuple[int, int]],
    delays: list[int],
    kv_ahead: bool,
) -> None:
    world = RoleWorld(instances, min(prefills, instances), delays, kv_ahead)
    for number, (prompt, output) in enumerate(sizes):
        at = world.refs[number % instances]
        prompt_ids = range(number, number + prompt)
        world.at(number * 97, partial(world.request, f"r{number}", at, prompt_ids, output))
    for at_ns, which in flips:
        world.at(at_ns, partial(world.flip, world.refs[which % instances]))
    world.play()
    event(f"orders during a Run: {min(world.early_orders, 3)}")
    # Those that are told to give may be left with requests that none has room for.
    for ref in world.refs:
        role(world, ref, ())
    world.play()
    world.check_end()


def test_an_instance_that_is_to_decode_takes_requests_before_its_prompt_is_computed() -> None:
    world = Witness(decodes=2)
    role(world, GIVER, [SECOND])
    world.request("b", FIRST, range(30, 34), 60)
    world.request("a", GIVER, range(PROMPT), 5)
    began_ns = world.now_ns + 3
    world.at(began_ns + LAYER_NS + 50, partial(role, world, GIVER, (), waits=False))
    world.at(began_ns + LAYER_NS + 50, partial(role, world, FIRST, [GIVER]))
    world.play()
    handed = [
        (at_ns, ref, to) for at_ns, ref, to, m in world.sent if isinstance(m, messages.Handover)
    ]
    [(at_ns, *ends)] = handed
    assert ends == [FIRST, GIVER]
    assert at_ns < began_ns + LAYERS * LAYER_NS
    assert world.times(messages.Promised, SECOND)
    assert world.times(messages.Gone, SECOND), "the prompt's own request stays"
    world.end()
