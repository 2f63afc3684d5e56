"""Transfers hop by hop: who waits for whom, and what a broken hop breaks."""

from __future__ import annotations

from livescale.messages.commands import StartLoad, StartSend
from livescale.sim.clock import Clock
from livescale.sim.network import Network
from livescale.sim.transfers import Transfers
from livescale.types import FromWorker, ModelSpec, WorkerRef

W = [WorkerRef(number) for number in range(5)]
SPEC = ModelSpec("m", (1000, 500, 1500), 1, 1)
CHUNK_NS = 100
TIMEOUT_NS = 50_000


class Scene:
    """A network of one byte per nanosecond with chunks of 100 bytes, and what its nodes hear."""

    def __init__(self) -> None:
        self.clock = Clock()
        network = Network(1_000_000_000, 1_000_000_000, 100)
        self.transfers = Transfers(self.clock, network, TIMEOUT_NS)
        self.first_byte: dict[WorkerRef, int] = {}
        self.layers: dict[WorkerRef, list[int]] = {}
        self.failed: dict[WorkerRef, str] = {}
        self.sends: dict[WorkerRef, tuple[int, str | None]] = {}

    # -- what transfers tell --------------------------------------------------------------------

    def load_started(self, order: StartLoad) -> None:
        self.first_byte[order.worker] = self.clock.now_ns

    def layer_arrived(self, order: StartLoad, watermark: int) -> None:
        self.layers.setdefault(order.worker, []).append(self.clock.now_ns)
        assert len(self.layers[order.worker]) == watermark

    def load_failed(self, order: StartLoad, reason: str) -> None:
        self.failed[order.worker] = reason
        self.transfers.node_gone(order.worker)

    def send_ended(self, order: StartSend, sent_bytes: int, error: str | None) -> None:
        self.sends[order.target] = (sent_bytes, error)

    # -- orders ---------------------------------------------------------------------------------

    def load(self, plan: int, source: int, target: int, forward_to: int | None = None) -> None:
        following = W[forward_to] if forward_to is not None else None
        order = StartLoad(plan, 0, W[target], "m", plan, FromWorker(W[source]), following, False)
        self.transfers.receive(order, SPEC, self)

    def send(self, plan: int, source: int, target: int) -> None:
        self.transfers.send(StartSend(plan, W[source], W[target], "m"), self)

    def run(self, until_ns: int | None = None) -> None:
        if until_ns is not None:
            is_over: list[bool] = []
            self.clock.at(until_ns, lambda: is_over.append(True))
            while not is_over:
                self.clock.run_next()
            return
        while self.clock.run_next():
            pass


def test_a_chain_flows_once_everybody_is_ready() -> None:
    scene = Scene()
    scene.load(1, 1, 2)
    scene.load(1, 0, 1, forward_to=2)
    scene.run(until_ns=10)
    scene.send(1, 0, 1)
    scene.run()
    assert scene.layers[W[1]] == [1010, 1510, 3010]
    assert scene.layers[W[2]] == [1110, 1610, 3110]
    assert (scene.first_byte[W[1]], scene.first_byte[W[2]]) == (10, 110)
    assert scene.sends == {W[1]: (3000, None)}


def test_who_joins_behind_a_receiver_stays_one_chunk_behind_it() -> None:
    scene = Scene()
    scene.load(1, 0, 1)
    scene.send(1, 0, 1)
    scene.run(until_ns=500)
    scene.load(2, 1, 2, forward_to=3)
    scene.load(2, 2, 3)
    scene.send(2, 1, 2)
    scene.run()
    assert scene.layers[W[1]] == [1000, 1500, 3000]
    # Its own link takes 3000 ns from time 500 on; layers come no earlier than that either.
    assert scene.layers[W[2]] == [1500, 2000, 3500]
    assert scene.layers[W[3]] == [1600, 2100, 3600]


def test_a_late_joiner_waits_for_a_sender_that_waits_itself() -> None:
    scene = Scene()
    scene.load(1, 0, 1)
    scene.load(2, 1, 2)
    scene.send(2, 1, 2)
    scene.run(until_ns=2000)
    assert scene.layers == {}
    scene.send(1, 0, 1)
    scene.run()
    assert scene.layers[W[1]] == [3000, 3500, 5000]
    arrivals = zip(scene.layers[W[1]], scene.layers[W[2]], strict=True)
    assert [behind - ahead for ahead, behind in arrivals] == [CHUNK_NS] * 3


def test_a_lost_node_fails_everything_behind_it() -> None:
    scene = Scene()
    scene.load(1, 0, 1, forward_to=2)
    scene.load(1, 1, 2, forward_to=3)
    scene.load(1, 2, 3)
    scene.send(1, 0, 1)
    scene.run(until_ns=1200)
    scene.transfers.node_gone(W[2])
    scene.run()
    assert scene.failed == {W[3]: "upstream w2.0 is gone"}
    assert scene.layers[W[1]] == [1000, 1500, 3000]
    assert scene.layers[W[2]] == [1100]
    assert scene.sends == {W[1]: (3000, None)}


def test_a_lost_source_fails_the_whole_chain() -> None:
    scene = Scene()
    scene.load(1, 0, 1, forward_to=2)
    scene.load(1, 1, 2)
    scene.send(1, 0, 1)
    scene.run(until_ns=1200)
    scene.transfers.node_gone(W[0])
    scene.run()
    assert sorted(scene.failed) == [W[1], W[2]]


def test_a_lost_target_ends_the_send_with_an_error() -> None:
    scene = Scene()
    scene.load(1, 0, 1)
    scene.send(1, 0, 1)
    scene.run(until_ns=1200)
    scene.transfers.node_gone(W[1])
    scene.run()
    assert scene.sends == {W[1]: (1000, "the target is gone")}


def test_whose_other_end_never_comes_gives_up() -> None:
    scene = Scene()
    scene.load(1, 0, 1)
    scene.send(2, 0, 3)
    scene.run()
    assert scene.clock.now_ns == TIMEOUT_NS
    assert scene.failed == {W[1]: "nobody sends"}
    assert scene.sends == {W[3]: (0, "the target does not answer")}
