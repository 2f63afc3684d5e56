"""What takes long to make for a model is made before the model comes, if there is time."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.topology import Device
from livescale.config.model import ModelConfig
from livescale.member.inputs import FetchFailed, Ordered
from livescale.member.instance import ServingLimits
from livescale.member.member import Member
from livescale.messages.commands import StartHolding
from livescale.messages.events import WorkerJoined
from livescale.runtime.controller_process.models_ahead import ModelsAhead
from livescale.runtime.member_process.preparing import Preparing
from livescale.runtime.wire.protocol import (
    Address,
    CatalogEntry,
    Holder,
    MayCome,
    MemberHello,
    PublishedModel,
)
from livescale.values.routes import Duty
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import HoldingId, LayerEntry, LayerSpan, Manifest, ModelSpec, WorkerRef

W = [WorkerRef(number) for number in range(4)]
DEVICE = Device("vllm", "host", "leaf", arena_bytes=100, kv_bytes=100)
NAMES = ("a", "b", "c")


def manifest(name: str) -> Manifest:
    layers = tuple(LayerEntry(n, 4 * n, 4, (), "", "") for n in range(3))
    return Manifest(name, "{}", "F32", layers)


# -- the worker: while it holds nothing -----------------------------------------------------------


class World:
    """A member and the inbox of its thread."""

    def __init__(self) -> None:
        self.member = Member(W[0], 100, ServingLimits("vllm", LiveLimits(), is_engine=True))
        self.inbox: list[Callable[[], object]] = []
        self.prepared: list[str] = []
        self.preparing = Preparing(
            lambda its: self.prepared.append(its.model), self.member, self.inbox.append
        )
        self._plan = 0

    def load(self) -> None:
        self._plan += 1
        order = StartHolding(
            HoldingId(self._plan, W[0]), "m", LayerSpan(0, 3), (), 4, duty=Duty(1, (W[0],))
        )
        self.member.step(1, [Ordered(order, (4, 4, 4), "m")])

    def fail(self) -> None:
        self.member.step(1, [FetchFailed(self._plan, "gone")])

    def go_on(self) -> None:
        self.preparing.go_on()
        while self.inbox:
            self.inbox.pop(0)()
            self.preparing.go_on()


@given(st.lists(st.sampled_from(("come", "load", "go on")), max_size=12))
def test_models_are_prepared_in_order_and_only_while_nothing_is_held(acts: list[str]) -> None:
    world = World()
    come = 0
    is_held = False
    for act in acts:
        before = len(world.prepared)
        if act == "come":
            world.preparing.add(manifest(str(come)))
            come += 1
        elif act == "load":
            world.fail() if is_held else world.load()
            is_held = not is_held
        else:
            world.go_on()
        assert not is_held or len(world.prepared) == before
    if is_held:
        world.fail()
    world.go_on()
    assert world.prepared == [str(number) for number in range(come)]


def test_an_order_that_came_meanwhile_is_first() -> None:
    world = World()
    world.preparing.add(manifest("a"))
    world.preparing.go_on()
    prepare = world.inbox.pop()
    world.load()
    prepare()
    assert world.prepared == []
    world.fail()
    world.go_on()
    assert world.prepared == ["a"]


# -- the controller: each engine is told of each model once ---------------------------------------


class Sent(list[str]):
    """The other end of a wire."""

    def send(self, message: MayCome) -> None:
        self.append(message.manifest.model)


def hello(ref: WorkerRef, *, is_engine: bool) -> MemberHello:
    joined = WorkerJoined(ref, DEVICE, is_engine=is_engine)
    return MemberHello(joined, Holder(ref, Address("127.0.0.1", 1), "host"))


def published(name: str, *, is_leaving: bool = False) -> PublishedModel:
    spec = ModelSpec(name, (4, 4, 4), 2, 2, 64)
    entry = CatalogEntry(spec, manifest(name), "/nowhere", (1,), 64)
    policy = ModelPolicy(spec, 0, 1)
    return PublishedModel(entry, policy, ModelConfig(path="/nowhere", name=name), is_leaving)


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(range(len(W)))), st.sets(st.sampled_from(NAMES))),
        max_size=8,
    )
)
def test_every_engine_learns_of_every_model_once(steps: list[tuple[set[int], set[str]]]) -> None:
    """In each order of joins, leaves and publications; the first worker is no engine."""
    ahead, wires = ModelsAhead(), {}
    for there, names in steps:
        wires = {number: wires.get(number, Sent()) for number in there}
        members = {W[n]: (wire, hello(W[n], is_engine=n > 0)) for n, wire in sorted(wires.items())}
        ahead.tell(members, [published(name) for name in sorted(names)])
        for number, wire in wires.items():
            assert len(wire) == len(set(wire))
            assert set(wire) >= names if number else not wire


def test_a_model_that_leaves_is_not_worth_an_engine() -> None:
    wire = Sent()
    members = {W[1]: (wire, hello(W[1], is_engine=True))}
    ModelsAhead().tell(members, [published("a", is_leaving=True), published("b")])
    assert wire == ["b"]
