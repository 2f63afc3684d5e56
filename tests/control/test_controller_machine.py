"""The whole Controller against an abstract world: whatever happens, everything ends."""

from __future__ import annotations

from abstract_world import AbstractWorld
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from livescale.control.config import Bounds, ControllerConfig, ModelPolicy
from livescale.messages.events import RequestArrived
from livescale.types import InstanceState, ModelSpec, Outcome

MS = 1_000_000
NUMBERS = range(5)


class ControllerMachine(RuleBasedStateMachine):
    """Random histories of workers, requests, answers and controllers."""

    @initialize(
        limits=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 3)), min_size=1, max_size=2),
        expected=st.integers(0, 5),
        ahead=st.integers(1, 3),
        attempts=st.integers(1, 3),
        known=st.booleans(),
    )
    def begin(
        self,
        limits: list[tuple[int, int]],
        expected: int,
        ahead: int,
        attempts: int,
        known: bool,
    ) -> None:
        models = tuple(
            ModelPolicy(
                ModelSpec(f"m{number}", (10,) * (3 + number), 1, 100),
                least,
                least + more,
                1000 if known else None,
                100 if known else None,
            )
            for number, (least, more) in enumerate(limits)
        )
        config = ControllerConfig(
            models,
            workers_expected=expected,
            settle_ns=20 * MS,
            dispatched_ahead_max=ahead,
            request_attempts_max=attempts,
            load_retry_ns=30 * MS,
            avoid_ns=10 * MS,
            bounds=Bounds(load_window_ns=50 * MS, scale_down_timeout_ns=20 * MS),
        )
        self.world = AbstractWorld(config)
        self.arrivals = 0

    # -- what may happen ------------------------------------------------------------------------

    @rule(number=st.sampled_from(NUMBERS))
    def join(self, number: int) -> None:
        if number not in self.world.workers:
            self.world.join(number)

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), gateway_first=st.booleans())
    def lose(self, data: st.DataObject, gateway_first: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.workers)))
        self.world.lose(number, gateway_first)

    @rule(count=st.integers(1, 4), tokens=st.integers(1, 80), second=st.booleans())
    def arrive(self, count: int, tokens: int, second: bool) -> None:
        models = list(self.world.layers)
        for _ in range(count):
            self.arrivals += 1
            model = models[-1] if second else models[0]
            self.world.arrive(f"r{self.arrivals}", model, tokens)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.requests))))

    @precondition(lambda self: any(r.worker for r in self.world.requests.values()))
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.FINISHED, Outcome.FAILED]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        running = sorted(r for r, record in self.world.requests.items() if record.worker)
        self.world.finish(data.draw(st.sampled_from(running)), outcome)

    @precondition(lambda self: any(w.answers for w in self.world.workers.values()))
    @rule(data=st.data(), count=st.integers(1, 6))
    def answer(self, data: st.DataObject, count: int) -> None:
        talking = sorted(n for n, w in self.world.workers.items() if w.answers)
        number = data.draw(st.sampled_from(talking))
        for _ in range(min(count, len(self.world.workers[number].answers))):
            self.world.answer(number)

    @precondition(lambda self: any(w.load and not w.is_loaded for w in self.world.workers.values()))
    @rule(data=st.data())
    def fail_load(self, data: st.DataObject) -> None:
        workers = self.world.workers
        loading = sorted(n for n, w in workers.items() if w.load and not w.is_loaded)
        self.world.fail_load(data.draw(st.sampled_from(loading)))

    @precondition(lambda self: self.world.old_news)
    @rule(data=st.data())
    def repeat_old_news(self, data: st.DataObject) -> None:
        last = len(self.world.old_news) - 1
        self.world.repeat_old_news(data.draw(st.integers(0, last)))

    @rule(gateway_too=st.booleans())
    def restart(self, gateway_too: bool) -> None:
        self.world.restart()
        if gateway_too:
            self.world.connect_gateway()

    @precondition(lambda self: not self.world.has_gateway)
    @rule()
    def connect_gateway(self) -> None:
        self.world.connect_gateway()

    @precondition(lambda self: self.world.workers)
    @rule()
    def lose_all_that_serve(self) -> None:
        """Those that drain may then hold the last copies."""
        fleet = self.world.controller.fleet
        serving = [i.worker for i in fleet.instances.values() if i.state is InstanceState.SERVING]
        for worker in serving:
            alive = self.world.workers.get(worker.worker)
            if alive is not None and alive.ref == worker:
                self.world.lose(worker.worker, gateway_first=False)

    @rule(gap_ns=st.integers(0, 30 * MS))
    def step(self, gap_ns: int) -> None:
        self.world.step(gap_ns)

    @rule()
    def settle_down(self) -> None:
        """A while in which everybody answers: else histories rarely get anywhere."""
        for _ in range(3):
            self._everybody_answers()
            self.world.step(5 * MS)

    # -- what must hold -------------------------------------------------------------------------

    def teardown(self) -> None:
        """When nothing goes wrong any more, every request ends and every order is answered."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if not world.has_gateway:
            world.connect_gateway()
        for number in NUMBERS:
            if number not in world.workers:
                world.join(number)
        rounds = 0
        while world.requests and rounds < 500:
            rounds += 1
            self._quiet_round()
        for _ in range(40):
            self._quiet_round()
        assert not world.events
        assert not world.requests, f"{world.controller!r} leaves {list(world.requests)}"
        assert not world.controller.router.requests
        world.checker.all_answered()
        for policy in world.config.models:
            instances = world.controller.fleet.of_model(policy.spec.name)
            serving = [i for i in instances if i.is_capacity]
            assert len(serving) <= policy.instances_max, serving
            assert world.controller.pool.holders(policy.spec.name), policy.spec.name
            draining = [i for i in instances if i.state is InstanceState.DRAINING]
            assert not draining, "everything that drains is released"
        assert not world.controller.scaling.sends
        reads = [w.ref for w in world.workers.values() if world.controller.pool.readers(w.ref)]
        assert not reads, "no read outlives its transfer"

    def _quiet_round(self) -> None:
        world = self.world
        # Nobody calls the controller but an event, or the wake-up that it asked for.
        if world.events or world.wake_ns is not None:
            world.step(5 * MS)
        for request in [r for r, record in world.requests.items() if record.worker]:
            world.finish(request, Outcome.FINISHED)
        self._everybody_answers()

    def _everybody_answers(self) -> None:
        for number, worker in self.world.workers.items():
            while worker.answers:
                self.world.answer(number)


def test_the_announcement_of_a_running_request_names_its_worker() -> None:
    """The abstract world itself: what a restarted controller hears."""
    config = ControllerConfig((ModelPolicy(ModelSpec("m", (1,), 1, 1), 1, 1),), workers_expected=1)
    world = AbstractWorld(config)
    world.join(0)
    world.arrive("r", "m", 1)
    world.step(0)
    while world.workers[0].answers:
        world.answer(0)
    world.step(0)
    world.restart()
    world.connect_gateway()
    (announced,) = [e for e in world.events if isinstance(e, RequestArrived)]
    assert (announced.attempt, announced.worker) == (1, world.workers[0].ref)


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    # Explaining a failure takes minutes here and says little.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
