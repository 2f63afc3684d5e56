"""Models that cannot be loaded: when that is so, who is told, and when loads are tried again."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    MS,
    SPEC,
    H,
    W,
    arrived,
    copies_of,
    host_joined,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    rejoined,
    report,
    reported,
    serving,
    step,
    whole,
)

from livescale.control.controller import Controller
from livescale.control.state.config import ControllerConfig
from livescale.control.state.load_failures import LoadFailures
from livescale.messages.commands import AnyCommand, Dispatch, FailRequest
from livescale.messages.events import (
    AgentJoined,
    AnyEvent,
    FirstByteArrived,
    HoldingCompleted,
    HoldingFailed,
    MembersLeave,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.stages import stage_specs
from livescale.values.types import IDS_PER_EPOCH, HoldingId, LayerSpan, WorkerRef

RETRY_NS = 100 * MS
CONFIG = ControllerConfig((), 0, load_retry_ns=RETRY_NS, load_retry_ns_max=8 * RETRY_NS)


def at_zero(workers: int = 1, policy: ModelPolicy | None = None, **config: object) -> Controller:
    settings = {"load_retry_ns": RETRY_NS, "load_retry_ns_max": 8 * RETRY_NS} | config
    return make_controller(workers, models=(policy or make_policy(least=0),), **settings)


def fail_loads(controller: Controller, now_ns: int, times: int, *first: AnyEvent) -> int:
    """Loads are ordered and fail, one after the other. Returns the time of the last failure."""
    events = first
    for _ in range(times):
        (load,) = loads_of(step(controller, now_ns, *events))
        now_ns += MS
        step(controller, now_ns, HoldingFailed(load.holding, "the file is wrong"))
        events = (Tick(),)
        now_ns = controller.models["m"].load_failures.blocked_until_ns
    return now_ns


def loading(controller: Controller) -> list[HoldingId]:
    """What workers are getting."""
    return [holding for holding in controller.loads.open if not holding.member.is_agent]


def failed(commands: list) -> list[str]:
    return [command.request for command in commands if isinstance(command, FailRequest)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_each_trial_waits_longer_up_to_a_bound_and_together_loads_count_once(
    together: list[int],
) -> None:
    failures, now_ns, plan = LoadFailures(CONFIG), 0, 0
    pauses = []
    for loads in together:
        newest = plan + loads
        for number in range(loads):
            failures.failed(now_ns + number, plan + 1 + number, newest, "why", has_copy=False)
        pauses.append(failures.blocked_until_ns - now_ns)
        now_ns, plan = failures.blocked_until_ns, newest
    assert failures.in_a_row == len(together)
    assert failures.total == sum(together)
    assert pauses == [min(RETRY_NS * 2**n, 8 * RETRY_NS) for n in range(len(together))]
    assert failures.problem == ("why" if len(together) >= CONFIG.load_failures_max else None)
    failures.ended_well()
    assert failures.problem is None
    assert failures.blocked_until_ns == 0


@given(plan=st.integers(1, 9), later_ns=st.integers(1, 9 * RETRY_NS), is_death=st.booleans())
def test_a_pause_follows_what_another_life_ordered_and_loads_under_way_together_prolong_none(
    plan: int, later_ns: int, is_death: bool
) -> None:
    """While two controllers act, the one learns of the other's later loads when workers join it:
    their numbers say nothing of when they were ordered."""
    first = IDS_PER_EPOCH + plan
    failures = LoadFailures(msgspec.structs.replace(CONFIG, epoch=1))
    failures.failed(0, first, first + 9, "why", has_copy=False)
    assert failures.blocked_until_ns == RETRY_NS
    failures.failed(later_ns, first + 1, first + 9, "why", has_copy=False)
    assert failures.blocked_until_ns == RETRY_NS
    if is_death:
        failures.died(later_ns, plan, first + 9, "why")
    else:
        failures.failed(later_ns, plan, first + 9, "why", has_copy=False)
    assert failures.blocked_until_ns == later_ns + RETRY_NS
    assert (failures.in_a_row, failures.problem) == (1, None)


def test_requests_of_a_model_that_cannot_be_loaded_fail_with_the_reason() -> None:
    controller = at_zero()
    commands = step(controller, 0, *joined(W[0]), arrived("r1"), arrived("r2"))
    now_ns = 0
    for trial in range(CONFIG.load_failures_max):
        assert not failed(commands), f"after {trial} failures"
        assert controller.status().models["m"].problem is None
        (load,) = loads_of(commands)
        commands = step(controller, now_ns + 1, HoldingFailed(load.holding, "it is gone"))
        now_ns = now_ns + 1 + RETRY_NS * 2**trial
        if trial + 1 < CONFIG.load_failures_max:
            commands = step(controller, now_ns, Tick())
    left_ns = RETRY_NS * 2 ** (CONFIG.load_failures_max - 1)
    assert [c for c in commands if isinstance(c, FailRequest)] == [
        FailRequest("r1", "it is gone", left_ns),
        FailRequest("r2", "it is gone", left_ns),
    ]
    assert controller.status().models["m"].problem == "it is gone"
    assert controller.status().models["m"].failed_loads == CONFIG.load_failures_max


def test_until_the_next_trial_requests_fail_at_once_and_then_one_tries_again() -> None:
    controller = at_zero()
    again_ns = fail_loads(controller, 0, 3, *joined(W[0]), arrived("r"))
    assert failed(step(controller, again_ns - 1, arrived("early"))) == ["early"]
    commands = step(controller, again_ns, arrived("late"))
    (load,) = loads_of(commands)
    assert not failed(commands)
    assert not failed(step(controller, again_ns + 1, arrived("later"))), "it waits for the trial"
    step(controller, again_ns + 2, *loaded(load.holding))
    assert controller.status().models["m"].problem is None
    assert controller.router.unfinished(controller.models["m"].entry.part) == 2


def test_a_model_that_serves_goes_on_whatever_other_loads_come_to() -> None:
    controller = serving(2, 1, load_retry_ns=RETRY_NS)
    now_ns = 10 * MS
    step(controller, now_ns, arrived("flood", 10**6))
    for _ in range(5):
        for holding in loading(controller):
            step(controller, now_ns, HoldingFailed(holding, "it is gone"))
        commands = step(controller, now_ns, arrived(f"r{now_ns}", 10**6))
        assert not failed(commands)
        now_ns = controller.models["m"].load_failures.blocked_until_ns
        step(controller, now_ns, Tick())
    assert controller.status().models["m"].problem == "it is gone", (
        "and administrators see why it does not grow"
    )


def test_a_model_that_lost_its_only_instance_and_cannot_be_loaded_again() -> None:
    controller = serving(1, 1, load_retry_ns=RETRY_NS)
    step(controller, 10 * MS, arrived("r"))
    step(controller, 11 * MS, WorkerLost(W[0], "killed"))
    commands = step(controller, 12 * MS, *joined(WorkerRef(0, 1)))
    now_ns = 12 * MS
    for _ in range(CONFIG.load_failures_max):
        (load,) = loads_of(commands)
        commands = step(controller, now_ns, HoldingFailed(load.holding, "it is gone"))
        if failed(commands):
            break
        now_ns = controller.models["m"].load_failures.blocked_until_ns
        commands = step(controller, now_ns, Tick())
    assert failed(commands) == ["r"]


def test_a_copy_that_cannot_be_made_is_a_problem_and_its_success_lets_loads_begin_at_once() -> None:
    controller = at_zero(workers=1, agents_expected=1)
    commands = step(controller, 0, *joined(W[0]), host_joined(0))
    now_ns = 0
    for _ in range(CONFIG.load_failures_max):
        assert controller.status().models["m"].problem is None
        (copy,) = copies_of(commands)
        step(controller, now_ns + 1, HoldingFailed(copy.holding, "it is gone"))
        now_ns += 9 * RETRY_NS
        commands = step(controller, now_ns, Tick())
    assert controller.status().models["m"].problem == "it is gone"
    (copy,) = copies_of(commands)
    # Loads from the files fail, too, and are given up.
    step(controller, now_ns, arrived("r"))
    for _ in range(CONFIG.load_failures_max):
        (holding,) = loading(controller)
        step(controller, now_ns, HoldingFailed(holding, "it is gone"))
        blocked_ns = controller.models["m"].load_failures.blocked_until_ns
        if controller.models["m"].load_failures.problem is None:
            now_ns = blocked_ns
            step(controller, now_ns, Tick())
    assert now_ns < blocked_ns
    commands = step(controller, now_ns + 1, *loaded(copy.holding), arrived("s"))
    assert not failed(commands)
    assert controller.status().models["m"].problem is None
    assert [load.feeds for load in loads_of(commands)] == [whole(copy.holding.member)]


def test_a_model_with_a_copy_in_host_memory_is_not_given_up_and_its_files_are_not_read_again() -> (
    None
):
    controller = at_zero(
        workers=1,
        agents_expected=1,
        load_failures_max=1,
        multicast="auto",
        # Storage is the fastest to read, as far as plans are concerned.
        remote_storage_bytes_per_s=10**12,
    )
    device = msgspec.structs.replace(DEVICE, downlink_bytes_per_s=10**12)
    host = msgspec.structs.replace(host_joined(0).host, uplink_bytes_per_s=10)
    commands = step(controller, 0, WorkerJoined(W[0], device), AgentJoined(H[0], host))
    (copy,) = copies_of(commands)
    failure = HoldingFailed(copy.holding, "it is gone")
    (load,) = loads_of(step(controller, 1, failure, arrived("r")))
    assert load.feeds == whole(None)
    commands = step(controller, 1 + RETRY_NS, Tick())
    (copy,) = copies_of(commands)
    step(controller, 2 + RETRY_NS, *loaded(copy.holding))
    commands = step(controller, 3 + RETRY_NS, HoldingFailed(load.holding, "it is gone"))
    assert not failed(commands)
    commands = step(controller, 3 + 2 * RETRY_NS, Tick())
    assert [load.feeds for load in loads_of(commands)] == [whole(copy.holding.member)]


def test_what_fails_while_a_dead_sender_is_replaced_is_no_problem() -> None:
    """Receivers keep what they have and are given another feed: their load does not fail."""
    controller = make_controller(3, models=(make_policy(least=2),), load_retry_ns=RETRY_NS)
    step(controller, 0, *joined(*W[:3]))
    step(controller, 1, WorkerLost(W[0], "killed"), arrived("r"))
    assert controller.models["m"].load_failures.total == 1, "of the sender, which was loading"
    assert controller.models["m"].load_failures.in_a_row == 0
    assert controller.status().models["m"].problem is None


def die_while_loading(controller: Controller, now_ns: int, *first: AnyEvent) -> list[AnyCommand]:
    """Whichever worker loads next dies, twice, and comes back. Returns what follows."""
    events = first
    for _ in range(2):
        (load,) = loads_of(step(controller, now_ns, *events))
        worker = load.holding.member
        now_ns += MS
        events = (WorkerLost(worker, "exit status -11"),)
    commands = step(controller, now_ns, *events)
    again = WorkerRef(worker.worker, worker.incarnation + 1)
    return commands + step(controller, now_ns, *joined(again))


def test_a_model_that_kills_workers_gets_two_of_them_and_is_told_as_the_reason() -> None:
    controller = at_zero(workers=4)
    commands = die_while_loading(controller, 0, *joined(*W[:4]), arrived("r"))
    assert failed(commands) == ["r"]
    assert not loads_of(commands), "the other workers are left alone"
    shown = controller.status().models["m"]
    assert (shown.failed_loads, shown.problem) == (2, "worker w1.0 was lost: exit status -11")
    assert failed(step(controller, 3 * MS, arrived("early"))) == ["early"]
    again_ns = controller.models["m"].load_failures.blocked_until_ns
    commands = step(controller, again_ns, arrived("late"))
    assert len(loads_of(commands)) == 1
    assert not failed(commands)


def test_one_worker_that_dies_while_it_loads_is_replaced_at_once() -> None:
    controller = at_zero(workers=2)
    (load,) = loads_of(step(controller, 0, *joined(*W[:2]), arrived("r")))
    commands = step(controller, MS, WorkerLost(load.holding.member, "killed"))
    (other,) = loads_of(commands)
    assert not failed(commands)
    step(controller, 2 * MS, *loaded(other.holding))
    assert controller.models["m"].load_failures.in_a_row == 0


def test_workers_that_are_lost_together_are_one_death() -> None:
    """A host that goes down takes all that loads there with it."""
    controller = make_controller(4, models=(make_policy(least=2),), load_retry_ns=RETRY_NS)
    loads = loads_of(step(controller, 0, *joined(*W[:4]), arrived("r")))
    lost = [WorkerLost(load.holding.member, "host down") for load in loads]
    commands = step(controller, MS, *lost)
    assert len(loads_of(commands)) == len(loads) == 2
    assert controller.status().models["m"].problem is None


def test_a_model_whose_copy_in_memory_cannot_be_loaded_is_given_up() -> None:
    """Files that only a worker finds wrong are in host memory like any others."""
    controller = at_zero(workers=1, agents_expected=1, multicast="auto")
    (copy,) = copies_of(step(controller, 0, *joined(W[0]), host_joined(0)))
    step(controller, MS, *loaded(copy.holding))
    commands, now_ns = step(controller, 2 * MS, arrived("r")), 2 * MS
    for trial in range(CONFIG.load_failures_max):
        assert not failed(commands), f"after {trial} failures"
        (load,) = loads_of(commands)
        commands = step(controller, now_ns, HoldingFailed(load.holding, "no such activation"))
        if trial + 1 < CONFIG.load_failures_max:
            now_ns = controller.models["m"].load_failures.blocked_until_ns
            commands = step(controller, now_ns, Tick())
    assert failed(commands) == ["r"]


@pytest.mark.parametrize("failing", [0, 1])
def test_requests_of_a_model_in_stages_do_not_wait_for_one_that_cannot_be_loaded(
    failing: int,
) -> None:
    wide = msgspec.structs.replace(SPEC, layer_bytes=(10, 5, 5, 5, 10), kv_bytes_per_token=3)
    stages = stage_specs(wide, [LayerSpan(0, 2), LayerSpan(2, 5)])
    policies = tuple(make_policy(least=1, spec=spec) for spec in stages)
    controller = make_controller(2, models=policies, load_retry_ns=RETRY_NS)
    first = arrived("r", model=stages[0].name)
    loads = {load.model: load for load in loads_of(step(controller, 0, *joined(*W[:2]), first))}
    good, bad = loads[stages[1 - failing].name], loads[stages[failing].name]
    step(controller, 1, FirstByteArrived(good.holding), HoldingCompleted(good.holding, 1))
    now_ns = 1
    for trial in range(CONFIG.load_failures_max):
        commands = step(controller, now_ns, HoldingFailed(bad.holding, "it is gone"))
        is_last = trial + 1 == CONFIG.load_failures_max
        assert failed(commands) == (["r"] if is_last else [])
        if not is_last:
            now_ns = controller.models[bad.model].load_failures.blocked_until_ns
            (bad,) = loads_of(step(controller, now_ns, Tick()))


@given(failing=st.integers(0, 2), there=st.sets(st.integers(0, 2), min_size=1))
def test_a_load_of_an_earlier_life_fails_though_not_all_its_ranks_have_joined(
    failing: int, there: set[int]
) -> None:
    """The next one waits, as after every load that fails."""
    spec = msgspec.structs.replace(SPEC, tp_size=3)
    policy = make_policy(least=1, spec=spec)
    controller = make_controller(
        3,
        models=(policy,),
        epoch=1,
        load_retry_ns=RETRY_NS,
        load_retry_ns_max=RETRY_NS,
        settle_ns=MS,
    )
    orders = [
        load_order(7, W[rank], 7, None, rank=rank, workers=(W[0], W[1], W[2])) for rank in range(3)
    ]
    ranks = sorted(there | {failing})
    step(controller, 0, *[rejoined(report(orders[rank], watermark=1)) for rank in ranks])
    step(controller, 1, HoldingFailed(orders[failing].holding, "the file is wrong"))
    others = [worker for rank, worker in enumerate(W[:3]) if rank not in ranks]
    assert not loads_of(step(controller, 2 * MS, *joined(*others, *W[3:6])))
    assert controller.status().models["m"].failed_loads == 1
    assert loads_of(step(controller, 1 + RETRY_NS, Tick())), "the pause is over"


@given(there=st.integers(0, 1), comes=st.booleans())
def test_requests_wait_for_an_instance_of_an_earlier_life_that_is_coming_together(
    there: int, comes: bool
) -> None:
    """Whatever loads of this life come to, and as long as its other rank may come back."""
    policy = make_policy(least=0, spec=msgspec.structs.replace(SPEC, tp_size=2))
    controller = at_zero(2, policy, epoch=1, load_failures_max=1)
    ranks = [report(load_order(7, W[n], 7, None, rank=n, workers=(W[0], W[1]))) for n in range(2)]
    step(controller, 0, rejoined(ranks[there]), *joined(W[2], W[3]))
    loads = loads_of(step(controller, MS, arrived("r")))
    assert len(loads) == 2
    failures = [HoldingFailed(load.holding, "it is gone") for load in loads]
    commands = step(controller, 2 * MS, *failures)
    assert controller.status().models["m"].problem == "it is gone"
    assert not failed(commands)
    if comes:
        commands = step(controller, 3 * MS, rejoined(ranks[1 - there]), reported(7))
        assert [c.request for c in commands if isinstance(c, Dispatch)] == ["r"]
    else:
        commands = step(controller, 3 * MS, *joined(W[1 - there]))
        assert failed(commands) == ["r"]


@pytest.mark.parametrize("leaves", [False, True])
def test_workers_whose_hosts_leave_are_no_deaths_by_the_model(leaves: bool) -> None:
    controller = at_zero(3, agents_expected=1)
    (copy,) = copies_of(step(controller, 0, host_joined(0), *joined(*W[:3])))
    step(controller, 1, *loaded(copy.holding))
    commands = step(controller, 2, arrived("r"))
    for now_ns in (3, 5):
        (order,) = loads_of(commands)
        if leaves:
            step(controller, now_ns, MembersLeave((order.holding.member,)))
        commands = step(controller, now_ns + 1, WorkerLost(order.holding.member, "it is gone"))
    failed = [command for command in commands if isinstance(command, FailRequest)]
    assert (len(failed), len(loads_of(commands))) == ((0, 1) if leaves else (1, 0))
