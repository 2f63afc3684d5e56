"""News of a controller's steps: a line per event, for people."""

from __future__ import annotations

from livescale.clusters.topology import Device
from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.messages.commands import PlanMade, StartHolding
from livescale.messages.events import (
    AnyEvent,
    FirstByteArrived,
    HoldingCompleted,
    HoldingFailed,
    LayerArrived,
    ModelAdded,
    ModelRemoved,
    TeamBroke,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.runtime.controller_process.step_news import StepNews
from livescale.runtime.wire.news import News
from livescale.telemetry.history.follower import Follower
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import ModelSpec, WorkerRef

S = 1_000_000_000
MB = 1_000_000
SPEC = ModelSpec("m", (MB, 2 * MB, 3 * MB), kv_bytes_per_token=1, model_tokens_max=100)
DEVICE = Device("cpu", "host", "leaf", arena_bytes=10 * MB, kv_bytes=100)
W = [WorkerRef(number) for number in range(3)]


class Told:
    """A controller and its news."""

    def __init__(self, *policies: ModelPolicy, workers: int = 1) -> None:
        self.controller = Controller(ControllerConfig(policies, workers_expected=workers))
        self.steps, self.follower = StepNews(), Follower()
        self.follower.begin(self.controller.config)
        self.loads: list[StartHolding] = []

    def step(self, now_ns: int, *events: AnyEvent) -> list[str]:
        commands = self.controller.step(now_ns, events)
        assert not [c for c in commands if isinstance(c, PlanMade) and not c.instances]
        self.loads += [c for c in commands if isinstance(c, StartHolding)]
        news = self.steps.observe(
            now_ns,
            self.follower.step(now_ns, events, commands),
            self.controller.status().models,
        )
        assert all(isinstance(line, News) and "\n" not in line.text for line in news)
        return [("! " if line.is_problem else "") + line.text for line in news]

    def fail(self, now_ns: int, reason: str) -> list[str]:
        return self.step(now_ns, HoldingFailed(self.loads[-1].holding, reason))


def one(least: int = 1, name: str = "m") -> ModelPolicy:
    spec = ModelSpec(name, SPEC.layer_bytes, 1, 100)
    return ModelPolicy(spec, least, 2, prefill_tokens_per_s=1000, kv_blocks=100)


def test_a_load_is_told_with_its_bytes_its_rate_and_its_model() -> None:
    told = Told(one())
    assert told.step(0, WorkerJoined(W[0], DEVICE)) == [
        "worker w0.0 has joined",
        "model m: 0 -> 1 instances (below_min)",
        "model m: instance 2 on w0.0 receives 6 MB from storage",
    ]
    held = told.loads[-1].holding
    told.step(S, FirstByteArrived(held), LayerArrived(held, 0, 1), LayerArrived(held, 1, 2))
    loads = told.steps.progress(S)
    assert loads is not None
    (load,) = loads
    assert (load.model, load.receiver) == ("m", "w0.0")
    assert (load.arrived_bytes, load.size_bytes, load.bytes_per_s) == (3 * MB, 6 * MB, 3 * MB)
    assert told.steps.progress(S) is None, "it did not get on"
    assert told.step(2 * S, LayerArrived(held, 2, 3), HoldingCompleted(held, 6 * MB)) == [
        "model m: instance 2 on w0.0 is loaded: 6 MB in 2 s (3 MB/s)"
    ]
    assert told.steps.progress(2 * S) == ()


def test_a_load_that_fails_again_and_again_is_told_rarely_and_its_end_once() -> None:
    told = Told(one())
    told.step(0, WorkerJoined(W[0], DEVICE))
    lines, now_ns = [], 0
    while now_ns < 200 * S:
        now_ns += 1
        lines += told.fail(now_ns, "it is gone")
        now_ns = told.controller.models["m"].load_failures.blocked_until_ns
        told.step(now_ns, Tick())
    assert len(told.loads) > 5
    assert [line for line in lines if line.startswith("! ")] == [
        "! model m: instance 2 on w0.0 failed and is retried: it is gone",
        "! model m: cannot be loaded now, and is retried: it is gone",
    ]
    held = told.loads[-1].holding
    arrived = [LayerArrived(held, n, n + 1) for n in range(3)]
    ended = told.step(now_ns + S, FirstByteArrived(held), *arrived, HoldingCompleted(held, 1))
    assert "model m: loads succeed again" in ended


def test_lost_workers_and_models_that_come_and_go_are_told() -> None:
    told = Told(one())
    told.step(0, WorkerJoined(W[0], DEVICE))
    assert told.step(1, WorkerLost(W[0], "connection closed"))[0] == (
        "! worker w0.0 is lost while loading m: connection closed"
    )
    assert told.step(2, WorkerJoined(WorkerRef(0, 1), DEVICE))[0] == (
        "worker w0.1 has joined in its place"
    )
    assert told.step(3, ModelAdded(one(0, "other"))) == [
        "model other: published, 6 MB, 0 to 2 instances"
    ]
    assert told.step(4, ModelRemoved("other")) == [
        "model other: withdrawn; the gateway rejects new requests",
        "model other: removed from all workers",
    ]


def test_a_team_that_broke_is_a_problem_at_two_workers() -> None:
    told = Told(one())
    told.step(0, WorkerJoined(W[0], DEVICE))
    assert told.step(S, TeamBroke(2, 5, (W[0], W[1])), TeamBroke(2, 6)) == [
        "! team 5 of instance 2 broke between w0.0 and w1.0",
        "! team 6 of instance 2 broke",
    ]
