"""The whole Controller against an abstract world: whatever happens, everything ends."""

from __future__ import annotations

import msgspec
from abstract_world import AbstractWorld
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from effort import examples
from livescale.common.regions import ALIGNMENT_BYTES
from livescale.control.state.config import ControllerConfig
from livescale.messages.events import RequestArrived
from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    NoCopies,
    Placement,
    SpreadCopies,
)
from livescale.values.scaling_policies import (
    Bounds,
    ModelPolicy,
    ScalingPolicy,
    SloAim,
    TargetOngoing,
)
from livescale.values.types import InstanceState, ModelSpec, Outcome, agent_ref

MS = 1_000_000
NUMBERS = range(5)
GATEWAYS = ("head", "web")
HOSTS = [agent_ref(number).worker for number in range(2)]
MODELS_MAX = 4
SCALINGS = [TargetOngoing(2000, 900, 20 * MS), SloAim(20 * MS, 50 * MS, 10 * MS), None]
STRATEGIES = [
    (SpreadCopies(), "auto"),
    (SpreadCopies(), "binomial"),
    (CacheCopies(40 * MS), "host"),
    (AllCopies(), "chain"),
    (AllCopies(), "host-k-way"),
    (NoCopies(), "storage"),
]


def make_policy(
    number: int,
    least: int,
    more: int,
    known: bool,
    ranks: int = 1,
    scaling: ScalingPolicy | None = None,
) -> ModelPolicy:
    """Models of different sizes; some may go to zero, some scale in other ways."""
    return ModelPolicy(
        ModelSpec(f"m{number}", (10,) * (3 + number), 1, 100, ranks),
        least,
        max(least + more, 1),
        1000 if known else None,
        100 if known else None,
        priority=number % 2,
        scaling=scaling,
        idle_ns=30 * MS,
    )


def workers_of(policy: ModelPolicy) -> int:
    """How many workers the model needs at least."""
    return max(policy.instances_min, 1) * policy.spec.tp_size


#: of a model: instances at least, and so many more; whether its capacity is known; its ranks
LIMITS = st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(1, 2))


def is_modest(limits: list[tuple[int, int, bool, int]]) -> bool:
    """There are workers for the least that everybody needs."""
    return sum(max(least, 1) * ranks for least, _, _, ranks in limits) <= len(NUMBERS)


#: of workers: for one model, for two, for all
ARENAS = st.sampled_from([1000, 2 * ALIGNMENT_BYTES, 1 << 20])


class ControllerMachine(RuleBasedStateMachine):
    """Random histories of workers, requests, answers and controllers."""

    @initialize(
        limits=st.lists(LIMITS, min_size=1, max_size=2).filter(is_modest),
        expected=st.integers(0, 5),
        ahead=st.integers(1, 3),
        attempts=st.integers(1, 3),
        scaling=st.sampled_from(SCALINGS),
        strategy=st.sampled_from(STRATEGIES),
        memory=st.sampled_from([30, 80, 1000]),
        hosts=st.integers(0, 2),
        is_late=st.booleans(),
        spares=st.sampled_from(["off", "needed", "recent", "slow-links"]),
        arena=ARENAS,
    )
    def begin(
        self,
        limits: list[tuple[int, int, bool, int]],
        expected: int,
        ahead: int,
        attempts: int,
        scaling: ScalingPolicy | None,
        strategy: tuple[Placement, str],
        memory: int,
        hosts: int,
        is_late: bool,
        spares: str,
        arena: int,
    ) -> None:
        models = tuple(
            make_policy(number, *limit, scaling=scaling if number else None)
            for number, limit in enumerate(limits)
        )
        config = ControllerConfig(
            models,
            workers_expected=expected,
            agents_expected=hosts,
            settle_ns=20 * MS,
            dispatched_ahead_max=ahead,
            request_attempts_max=attempts,
            load_retry_ns=30 * MS,
            load_retry_ns_max=60 * MS,
            avoid_ns=10 * MS,
            scaling=Bounds(load_window_ns=50 * MS, scale_down_timeout_ns=20 * MS),
            placement=strategy[0],
            multicast=strategy[1],
            chunk_bytes=4,
            warm_spares=spares,
        )
        self._begin(AbstractWorld(config, memory, is_late, arena), hosts)

    def _begin(self, world: AbstractWorld, hosts: int) -> None:
        self.world = world
        self.hosts = HOSTS[:hosts]
        self.arrivals = 0
        self.models_made = len(world.policies)

    # -- what may happen ------------------------------------------------------------------------

    @rule(number=st.sampled_from([*NUMBERS, *HOSTS]))
    def join(self, number: int) -> None:
        if number in [*NUMBERS, *self.hosts] and number not in self.world.members:
            self.world.join(number)

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), gateway_first=st.booleans())
    def lose(self, data: st.DataObject, gateway_first: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.members)))
        self.world.lose(number, gateway_first)

    @rule(least=st.integers(0, 1), known=st.booleans(), ranks=st.integers(1, 2))
    def add_model(self, least: int, known: bool, ranks: int) -> None:
        # There are workers for the least that everybody needs.
        needed = sum(map(workers_of, self.world.policies.values()))
        if self.models_made < MODELS_MAX and needed + ranks <= len(NUMBERS):
            self.world.add_model(make_policy(self.models_made, least, 1, known, ranks))
            self.models_made += 1

    @rule(data=st.data(), least=st.integers(0, 2), more=st.integers(0, 2))
    def change_limits(self, data: st.DataObject, least: int, more: int) -> None:
        name = data.draw(st.sampled_from(self.served()))
        policy = self.world.policies[name]
        others = [p for p in self.world.policies.values() if p is not policy]
        # There are workers for the least that everybody needs.
        spare = len(NUMBERS) - sum(map(workers_of, others))
        least = min(least, spare // policy.spec.tp_size)
        most = max(least + more, 1)
        self.world.change_model(
            msgspec.structs.replace(policy, instances_min=least, instances_max=most)
        )

    @precondition(lambda self: len(self.served()) > 1)
    @rule(data=st.data())
    def remove_model(self, data: st.DataObject) -> None:
        self.world.remove_model(data.draw(st.sampled_from(self.served())))

    @rule(count=st.integers(1, 4), tokens=st.integers(1, 80), last=st.booleans())
    def arrive(self, count: int, tokens: int, last: bool) -> None:
        for _ in range(count):
            self.arrivals += 1
            model = self.served()[-1 if last else 0]
            self.world.arrive(f"{GATEWAYS[self.arrivals % 2]}-{self.arrivals}", model, tokens)

    def served(self) -> list[str]:
        return [name for name in self.world.policies if name not in self.world.leaving]

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.requests))))

    @rule(gateway=st.sampled_from(GATEWAYS), is_told=st.booleans())
    def lose_gateway(self, gateway: str, is_told: bool) -> None:
        self.world.lose_gateway(gateway, is_told)

    @precondition(lambda self: any(r.worker for r in self.world.requests.values()))
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.FINISHED, Outcome.FAILED]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        running = sorted(r for r, record in self.world.requests.items() if record.worker)
        self.world.finish(data.draw(st.sampled_from(running)), outcome)

    @precondition(lambda self: any(m.answers for m in self.world.members.values()))
    @rule(data=st.data(), count=st.integers(1, 6))
    def answer(self, data: st.DataObject, count: int) -> None:
        talking = sorted(n for n, m in self.world.members.items() if m.answers)
        number = data.draw(st.sampled_from(talking))
        for _ in range(min(count, len(self.world.members[number].answers))):
            self.world.answer(number)

    @precondition(lambda self: self.world.arriving())
    @rule(data=st.data(), is_announced=st.booleans())
    def fail(self, data: st.DataObject, is_announced: bool) -> None:
        self.world.fail(data.draw(st.sampled_from(self.world.arriving())), is_announced)

    @precondition(lambda self: self.world.open_feeds())
    @rule(data=st.data(), is_stalled=st.booleans())
    def break_feed(self, data: st.DataObject, is_stalled: bool) -> None:
        last = len(self.world.open_feeds()) - 1
        self.world.break_feed(data.draw(st.integers(0, last)), is_stalled)

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
        for number in [*NUMBERS, *self.hosts]:
            self.join(number)
        rounds = 0
        while world.requests and rounds < 500:
            rounds += 1
            self._quiet_round()
        for _ in range(60):
            self._quiet_round()
        assert not world.waiting
        assert not world.requests, f"{world.controller!r} leaves {list(world.requests)}"
        assert not world.controller.router.requests
        assert not world.leaving, "every model that was withdrawn is gone"
        world.checker.all_answered()
        for policy in world.policies.values():
            self._check_at_rest(policy)
        assert not world.controller.loads.open
        members = world.members.values()
        reads = [m.ref for m in members if world.controller.pool.reads.count(m.ref)]
        assert not reads, "no read outlives its transfer"

    def _check_at_rest(self, policy: ModelPolicy) -> None:
        name, controller = policy.spec.name, self.world.controller
        pool = controller.pool
        instances = controller.fleet.of_part(controller.models[name].entry.part)
        serving = [i for i in instances if i.is_capacity]
        assert policy.instances_min <= len(serving) <= policy.instances_max, serving
        draining = [i for i in instances if i.state is InstanceState.DRAINING]
        keeps = self.world.config.warm_spares != "off"
        assert keeps or not pool.spares(name)
        assert not (keeps and draining), "what drains becomes a warm spare"
        may_stay = [i for i in draining if pool.is_last(i.copy)]
        assert draining == may_stay, "everything that drains is released, but for last copies"
        copies = pool.host_copies(name)
        assert all(copy.is_complete for copy in copies)
        placement = self.world.config.placement
        if isinstance(placement, SpreadCopies):
            assert len(copies) <= 1, "one host copy per model is enough"
        if isinstance(placement, SpreadCopies | AllCopies) and self._has_much_memory():
            wanted = 1 if isinstance(placement, SpreadCopies) else len(self.hosts)
            assert len(copies) == wanted, copies
            assert not draining, "a host copy lets the last instance go"
        if isinstance(placement, NoCopies) or not self.hosts:
            assert not copies

    def _has_much_memory(self) -> bool:
        return bool(self.hosts) and self.world.memory_bytes == 1000

    def _quiet_round(self) -> None:
        world = self.world
        # Nobody calls the controller but an event, or the wake-up that it asked for.
        if world.waiting or world.wake_ns is not None:
            world.step(5 * MS)
        for request in [r for r, record in world.requests.items() if record.worker]:
            world.finish(request, Outcome.FINISHED)
        self._everybody_answers()

    def _everybody_answers(self) -> None:
        for number, member in self.world.members.items():
            while member.answers:
                self.world.answer(number)


class LiveMachine(ControllerMachine):
    """The same with instances that work while they load, in histories that often get there."""

    @initialize(
        order=st.sampled_from(["zigzag", "zigzag", "overlap"]),
        more=st.integers(1, 3),
        ranks=st.integers(1, 2),
        ahead=st.integers(1, 2),
        attempts=st.integers(1, 3),
        others=st.integers(0, 1),
        multicast=st.sampled_from(["auto", "chain", "binomial"]),
        spares=st.sampled_from(["off", "recent"]),
        arena=ARENAS,
    )
    def begin(
        self,
        order: str,
        more: int,
        ranks: int,
        ahead: int,
        attempts: int,
        others: int,
        multicast: str,
        spares: str = "recent",
        arena: int = 1000,
    ) -> None:
        config = ControllerConfig(
            tuple(make_policy(number, 1, more, True, ranks) for number in range(1 + others)),
            workers_expected=0,
            settle_ns=0,
            dispatched_ahead_max=ahead,
            request_attempts_max=attempts,
            load_retry_ns=30 * MS,
            load_retry_ns_max=60 * MS,
            avoid_ns=10 * MS,
            scaling=Bounds(load_window_ns=50 * MS, scale_down_timeout_ns=20 * MS),
            multicast=multicast,
            chunk_bytes=4,
            live_order=order,
            live_ahead_max=4,
            warm_spares=spares,
            drain="move" if ahead % 2 else "finish",
        )
        self._begin(AbstractWorld(config, arena_bytes=arena), hosts=0)

    @rule(count=st.integers(3, 8), words=st.integers(1, 3), taken=st.integers(0, 3))
    def burst(self, count: int, words: int, taken: int) -> None:
        """On a pool that has settled long prompts come and loads begin, of which workers tell
        little by little; then sources take some over."""
        for number in NUMBERS:
            self.join(number)
        self.settle_down()
        self.arrive(count, 80, last=False)
        for _ in range(words + 1):
            self.world.step(MS)
            for number, worker in self.world.workers.items():
                if worker.answers:
                    self.world.answer(number)
        self.world.step(MS)
        for pair in self.world.live_pairs():
            self.world.take(*pair, taken)

    @precondition(lambda self: self.world.live_pairs())
    @rule(data=st.data(), count=st.integers(1, 3))
    def take(self, data: st.DataObject, count: int) -> None:
        self.world.take(*data.draw(st.sampled_from(self.world.live_pairs())), count)


def test_a_restarted_controller_lets_go_of_a_withdrawn_model_that_was_loading_live() -> None:
    machine = LiveMachine()
    machine.begin("zigzag", more=1, ranks=1, ahead=1, attempts=1, others=0, multicast="auto")
    machine.join(number=0)
    machine.step(gap_ns=0)
    machine.add_model(known=False, least=0, ranks=1)
    machine.world.remove_model("m0")
    machine.restart(gateway_too=False)
    machine.teardown()


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
    (announced,) = [e for e in world.waiting if isinstance(e, RequestArrived)]
    assert (announced.attempt, announced.worker) == (1, world.workers[0].ref)


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    # Explaining a failure takes minutes here and says little.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)

TestLiveMachine = LiveMachine.TestCase
TestLiveMachine.settings = TestControllerMachine.settings
