"""The swarm finds bugs: the controller is broken on purpose, and some seed must say so.

Each mutation takes one rule out of the production controller. It is caught by the rule named
beside it, which is stated from the outside; unbroken, the same seeds pass (`test_swarm.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from effort import mostly_long
from livescale.batching.blocks import BlockPool
from livescale.cli.main import main
from livescale.control import controller as controller_module
from livescale.control.attempts import Attempts
from livescale.control.client_queues import ClientQueues
from livescale.control.config import ControllerConfig
from livescale.control.controller import Controller
from livescale.control.fleet import TRANSITIONS, Fleet, Instance, WorkerRecord
from livescale.control.host_copies import HostCopies
from livescale.control.load_failures import LoadFailures
from livescale.control.loads import Loads
from livescale.control.model_state import ModelState
from livescale.control.pairing import Pairings
from livescale.control.placement import HostRoom
from livescale.control.pool import ParameterPool
from livescale.control.router import LiveDoor, RequestRecord, Router
from livescale.control.scaling import Scaling, Wish
from livescale.messages.commands import AnyCommand, Dispatch, Drain
from livescale.messages.events import (
    LayerArrived,
    LoadCompleted,
    ModelChanged,
    RequestEnded,
    WorkerLost,
)
from livescale.sim.agent import SimAgent
from livescale.sim.channel import SimChannel
from livescale.sim.swarm import run_seed
from livescale.types import InstanceId, InstanceState, PlanId, WorkerRef

SEEDS = range(150)

Break = Callable[[pytest.MonkeyPatch], None]


def attempts_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The end of an earlier attempt ends the one under way."""
    ended = Attempts.ended

    def broken(self: Attempts, event: RequestEnded, now_ns: int) -> bool:
        record = self._router.requests.get(event.request)
        attempt = record.attempt if record is not None else event.attempt
        return ended(self, msgspec.structs.replace(event, attempt=attempt), now_ns)

    patch.setattr(Attempts, "ended", broken)


def draining_instances_are_released_early(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Scaling, instance: Instance) -> bool:
        return False

    patch.setattr(Scaling, "_is_busy", broken)


def the_last_copy_may_go(patch: pytest.MonkeyPatch) -> None:
    def broken(self: ParameterPool, model: str, holder: WorkerRef) -> bool:
        return False

    patch.setattr(ParameterPool, "is_last", broken)


def copies_that_are_read_may_go(patch: pytest.MonkeyPatch) -> None:
    def broken(self: ParameterPool, copy: object) -> bool:
        return False

    patch.setattr(ParameterPool, "_is_read", broken)


def losses_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A lost worker's instance is kept."""

    init = Controller.__init__

    def broken(self: Controller, config: ControllerConfig) -> None:
        init(self, config)
        self._handlers[WorkerLost] = lambda event: None

    patch.setattr(Controller, "__init__", broken)


def changed_limits_are_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A model goes on with the limits that it was published with."""
    init = Controller.__init__

    def broken(self: Controller, config: ControllerConfig) -> None:
        init(self, config)
        self._handlers[ModelChanged] = lambda event: None

    patch.setattr(Controller, "__init__", broken)


def nobody_asks_to_be_woken(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Controller) -> None:
        return

    patch.setattr(Controller, "_ask_to_wake", broken)


def loading_instances_get_requests(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Controller, state: ModelState) -> None:
        name = state.spec.name
        instances = [(i.id, i.worker) for i in self.fleet.of_model(name) if i.is_capacity]
        for assignment in self.router.assign(self._now_ns, name, instances):
            record = assignment.request
            self._commands.append(
                Dispatch(record.id, record.attempt, assignment.instance, assignment.worker)
            )

    patch.setattr(Controller, "_dispatch", broken)


def failed_feeds_are_not_replaced(patch: pytest.MonkeyPatch) -> None:
    def broken(loads: Loads, pool: object, topology: object) -> list[object]:
        loads.repaired()
        return []

    patch.setattr(controller_module, "repair_loads", broken)


def workers_are_given_out_twice(patch: pytest.MonkeyPatch) -> None:
    def spare(self: Fleet, arena_bytes: int) -> list[WorkerRecord]:
        return [self.workers[number] for number in sorted(self.workers)]

    def place(self: Fleet, instance: Instance) -> None:
        for worker in instance.workers:
            self.workers[worker.worker].instance = instance.id
        self._add(instance)

    begin = ParameterPool.begin

    def begin_once(
        self: ParameterPool, model: str, workers: tuple[WorkerRef, ...], layers: int, size: int
    ) -> None:
        # The pool notices a second copy of one model itself: this is about the checker.
        if self.find(model, workers[0]) is None:
            begin(self, model, workers, layers, size)

    patch.setattr(Fleet, "spare", spare)
    patch.setattr(Fleet, "place", place)
    patch.setattr(ParameterPool, "begin", begin_once)


def leftovers_are_released_again(patch: pytest.MonkeyPatch) -> None:
    release_empty = Scaling.release_empty

    def broken(self: Scaling) -> Sequence[AnyCommand]:
        commands = release_empty(self)
        for remnant in self._fleet.remnants.values():
            remnant.is_released = False
        return commands

    patch.setattr(Scaling, "release_empty", broken)


def draining_instances_get_requests(patch: pytest.MonkeyPatch) -> None:
    takers = Pairings.takers

    def broken(
        self: Pairings, now_ns: int, state: ModelState
    ) -> tuple[Sequence[tuple[InstanceId, WorkerRef]], list[LiveDoor]]:
        serving, live = takers(self, now_ns, state)
        draining = [i for i in self._fleet.draining.values() if i.model == state.spec.name]
        return [*serving, *((i.id, i.worker) for i in draining if not i.is_released)], live

    patch.setattr(Pairings, "takers", broken)


def the_last_that_serves_may_go(patch: pytest.MonkeyPatch) -> None:
    """Others load, and nobody serves meanwhile."""

    def broken(self: Scaling, model: str) -> int:
        return len(self._pairings.unpaired(model))

    patch.setattr(Scaling, "_drainable", broken)


def drains_are_kept_secret(patch: pytest.MonkeyPatch) -> None:
    shrink = Scaling._shrink

    def broken(self: Scaling, wish: Wish) -> Sequence[AnyCommand]:
        return [c for c in shrink(self, wish) if not isinstance(c, Drain)]

    patch.setattr(Scaling, "_shrink", broken)


def attempts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A request that goes elsewhere keeps the number of its first attempt."""
    retry = Router.retry

    def broken(self: Router, record: RequestRecord) -> None:
        retry(self, record)
        record.attempt -= 1

    patch.setattr(Router, "retry", broken)


def the_first_layer_is_taken_for_the_last(patch: pytest.MonkeyPatch) -> None:
    moves = dict(TRANSITIONS[InstanceState.LOADING])
    moves[LayerArrived] = InstanceState.SERVING
    serving = {**TRANSITIONS[InstanceState.SERVING], LayerArrived: InstanceState.SERVING}
    serving[LoadCompleted] = InstanceState.SERVING
    patch.setitem(TRANSITIONS, InstanceState.LOADING, moves)
    patch.setitem(TRANSITIONS, InstanceState.SERVING, serving)


def host_memory_seems_endless(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostCopies) -> list[HostRoom]:
        return [HostRoom(record.ref, 1 << 50) for record in self._fleet.living_agents()]

    patch.setattr(HostCopies, "_rooms", broken)


def models_with_instances_are_given_up(patch: pytest.MonkeyPatch) -> None:
    """The living instances of a model whose loads fail are not looked at."""
    fail_unloadable = Controller._fail_unloadable

    def broken(self: Controller) -> None:
        of_model, self.fleet.of_model = self.fleet.of_model, lambda model: []
        fail_unloadable(self)
        self.fleet.of_model = of_model

    patch.setattr(Controller, "_fail_unloadable", broken)


def the_first_failed_load_is_the_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadFailures, "problem", property(lambda self: self._reason or None))


#: the mutation, and the rule that catches it
def requests_are_served_by_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """Whoever sends much is served much."""
    in_turn = ClientQueues.in_turn

    def broken(self: ClientQueues[RequestRecord]) -> Iterator[RequestRecord]:
        return iter(sorted(in_turn(self), key=lambda record: record.order))

    patch.setattr(ClientQueues, "in_turn", broken)


def weights_are_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A turn is worth as many requests as anybody's."""
    arrive = Router.arrive

    def broken(self: Router, *args: object, weight: int = 1, **named: object) -> RequestRecord:
        return arrive(self, *args, weight=weight + 1, **named)

    patch.setattr(Router, "arrive", broken)


MUTATIONS: list[tuple[Break, str]] = [
    (requests_are_served_by_order_of_arrival, "another one gets one turn at most"),
    (weights_are_not_heeded, "another one gets one turn at most"),
    (attempts_are_not_checked, "a request fails after its last attempt|one attempt at a time"),
    (attempts_are_not_counted, "attempts grow"),
    (draining_instances_are_released_early, "an instance with requests is not released"),
    (the_last_copy_may_go, "the last copy is kept"),
    (copies_that_are_read_may_go, "a copy that is read from is kept"),
    (changed_limits_are_not_heeded, "every model comes to its least number of instances"),
    (losses_are_not_noticed, "only living members get orders|senders are alive"),
    (nobody_asks_to_be_woken, "every request ends"),
    (loading_instances_get_requests, "complete models serve"),
    (
        failed_feeds_are_not_replaced,
        "every request ends|every order is answered|withdrawn and are not gone",
    ),
    (workers_are_given_out_twice, "a worker is in one instance"),
    (leftovers_are_released_again, "orders are new"),
    (draining_instances_get_requests, "draining instances get no requests"),
    (the_last_that_serves_may_go, "the last instance that serves stays"),
    (drains_are_kept_secret, "states change along the table"),
    (the_first_layer_is_taken_for_the_last, "complete models serve"),
    (host_memory_seems_endless, "copies fit the host"),
    (models_with_instances_are_given_up, "requests of a model with instances wait"),
    (the_first_failed_load_is_the_last, "a model is given up after failed loads"),
]


#: no seed among the first ones notices them
LATE = (
    the_last_copy_may_go,
    models_with_instances_are_given_up,
    changed_limits_are_not_heeded,
    attempts_are_not_checked,
    host_memory_seems_endless,
    requests_are_served_by_order_of_arrival,
)


@pytest.mark.parametrize(
    ("mutation", "rule"),
    mostly_long(MUTATIONS, [row for row in MUTATIONS if row[0] not in LATE]),
    ids=[mutation.__name__ for mutation, _ in MUTATIONS],
)
def test_some_seed_catches(
    mutation: Break,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    mutation(monkeypatch)
    outcome = next((o for o in map(run_seed, SEEDS) if o.error), None)
    assert outcome is not None, f"no seed of {SEEDS} notices"
    record_property("seed", outcome.seed)
    assert re.search(rule, outcome.error), outcome.trace
    print(f"seed {outcome.seed}: {outcome.error[:160]}")


def layers_are_told_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    arrived = SimAgent.layer_arrived

    def broken(self: SimAgent, plan: PlanId, layer: int) -> None:
        arrived(self, plan, layer + 1)

    patch.setattr(SimAgent, "layer_arrived", broken)


def messages_come_twice(patch: pytest.MonkeyPatch) -> None:
    arrive = SimChannel._arrive

    def broken(self: SimChannel[object], sent_ns: int, message: object) -> None:
        arrive(self, sent_ns, message)
        arrive(self, sent_ns, message)

    patch.setattr(SimChannel, "_arrive", broken)


def reports_exceed_the_kv_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "used", property(lambda self: self.blocks + 1))


MEMBERS: list[tuple[Break, str]] = [
    (layers_are_told_before_they_are_there, "a layer counts when it is whole"),
    (
        messages_come_twice,
        "request ids are unique|comes once|answered once|a worker belongs to one",
    ),
    (reports_exceed_the_kv_pool, "KV blocks are not overdrawn"),
]


@pytest.mark.parametrize(("mutation", "rule"), MEMBERS, ids=[m.__name__ for m, _ in MEMBERS])
def test_checkers_watch_members_too(
    mutation: Break, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    outcome = next((o for o in map(run_seed, SEEDS) if o.error), None)
    assert outcome is not None, f"no seed of {SEEDS} notices"
    assert re.search(rule, outcome.error), outcome.trace


def test_a_failing_seed_is_told_with_the_command_that_runs_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loading_instances_get_requests(monkeypatch)
    figures = tmp_path / "swarm.json"
    code = main(["swarm", "--seeds", "3", "--jobs", "1", "--json", str(figures)])
    said = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert code == 1
    assert found["violations"] == len(found["failing"]) > 0
    for seed in found["failing"]:
        assert f"livescale swarm --seed {seed}\n" in said
    again = main(["swarm", "--seed", str(found["failing"][0])])
    said = capsys.readouterr().out
    assert again == 1
    assert "complete models serve" in said
    assert "Traceback" in said
