"""Live pairs: who helps whom, who gets requests meanwhile, and what becomes of those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from clusters import W, copies, rails, request, singles
from hypothesis import given
from hypothesis import strategies as st
from stories import (
    DEVICE,
    MS,
    adopted,
    arrived,
    finished,
    instances_of,
    joined,
    load_order,
    loaded,
    loads_of,
    make_controller,
    make_policy,
    plans_of,
    rejoined,
    report,
    reported,
    serving,
    step,
)

from livescale.control.controller import Controller
from livescale.control.multicast.planner import make_plan
from livescale.control.state.config import PairRule
from livescale.control.together.pairing import (
    PairingChoice,
    PairTerms,
    choose_pairings,
    free_instances,
    live_order_of,
)
from livescale.messages.commands import AnyCommand, ChangeDuty, Dispatch, Drain, FailRequest, Paired
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    FirstByteArrived,
    HoldingCompleted,
    HoldingFailed,
    LayerArrived,
    LiveStarted,
    RequestArrived,
    RequestEnded,
    WorkerJoined,
    WorkerLost,
)
from livescale.messages.scale_plan import pair_rate
from livescale.telemetry.record.record import (
    RECORD_VERSION,
    AnyLine,
    RunLine,
    StepLine,
    read_record,
    write_record,
)
from livescale.telemetry.replay import replay
from livescale.values.routes import Partner
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import (
    HoldingId,
    InstanceState,
    LayerSpan,
    ModelSpec,
    Outcome,
    WorkerRef,
)

S1, S2 = Partner(201, W[20]), Partner(202, W[21])
LIVE: dict[str, Any] = {
    "live_order": "zigzag",
    "live_over_ns": 0,
    "pairs": PairRule(block_tokens=None),
}
#: what w1 loads in most of these: the first plan, for instance 2
TARGET = HoldingId(1, W[1])


# -- which loading instance helps which overloaded one --------------------------------------------


def test_two_live_instances_of_one_chain_only_its_end_meets_no_parameters() -> None:
    """BlitzScale Figure 12 (targets: B38): in one chain only T2 is free, in two both ends are."""
    topology = singles(4)
    one = make_plan(request(copies(W[0]), [W[2], W[3]]), topology, "chain")
    assert one.routes() == ("w0.0 -> w2.0 -> w3.0",)
    first, second = choose_pairings(one, "zigzag", 0, [S1])
    alone = "alone: every overloaded instance has a helper"
    assert first == PairingChoice(alone, "zigzag")
    helps = "helps instance 201, sends no parameters on"
    assert second == PairingChoice(helps, "zigzag", (S1,))
    two = make_plan(request(copies(W[0], W[1]), [W[2], W[3]]), topology, "chain")
    assert two.routes() == ("w0.0 -> w2.0", "w1.0 -> w3.0")
    assert [(c.live_order, c.gives_to) for c in choose_pairings(two, "zigzag", 0, [S1, S2])] == [
        ("zigzag", (S1,)),
        ("zigzag", (S2,)),
    ]
    both = choose_pairings(one, "zigzag", 0, [S1, S2])
    assert [c.gives_to for c in both] == [(S2,), (S1,)], "most need: the tail"
    assert both[0].reason == "helps instance 202, sends parameters on, too"


def test_of_chains_the_ends_help_first_then_those_before_them() -> None:
    plan = make_plan(request(copies(W[0], W[1]), W[2:7]), singles(7), "chain")
    assert sorted(plan.routes()) == ["w0.0 -> w2.0 -> w4.0 -> w6.0", "w1.0 -> w3.0 -> w5.0"]
    assert [plan.instances[i] for i in live_order_of(plan)] == [
        (W[6],),
        (W[5],),
        (W[4],),
        (W[2],),
        (W[3],),
    ]


def test_what_goes_on_within_a_scale_up_group_leaves_the_uplink_free() -> None:
    plan = make_plan(request(copies(W[0]), [W[2], W[3]]), rails(2, 2), "chain")
    assert plan.routes() == ("w0.0 -> w2.0 -> w3.0",)
    assert free_instances(plan) == [0, 1]


def test_a_short_load_is_waited_for() -> None:
    plan = make_plan(request(copies(W[0]), [W[1]]), singles(2), "chain")
    assert plan.predicted_ns is not None
    (waits,) = choose_pairings(plan, "zigzag", plan.predicted_ns, [S1])
    assert (waits.live_order, waits.gives_to) == (None, ())
    assert waits.reason == "the load should take 26843.5 ms: up to 26843.5 ms it is waited for"
    (helps,) = choose_pairings(plan, "zigzag", plan.predicted_ns - 1, [S1])
    assert (helps.live_order, helps.gives_to) == ("zigzag", (S1,))
    unknown = msgspec.structs.replace(plan, predicted_ns=None)
    (helps,) = choose_pairings(unknown, "zigzag", 1 << 60, [S1])
    assert helps.live_order is not None, "who knows how long it takes"


def test_overlap_works_alone_even_if_others_are_overloaded() -> None:
    plan = make_plan(request(copies(W[0]), [W[1]]), singles(2), "chain")
    (choice,) = choose_pairings(plan, "overlap", 0, [S1])
    assert choice == PairingChoice("alone: so it is configured", "overlap")


def terms(
    tokens_per_s: int | None, *rates: int, load_tokens_min: int = 8, most: int | None = 600
) -> PairTerms:
    """KV of 100 bytes per token; links from w1 to S1, S2, … carry `rates` (bytes per second)."""
    links = {(W[1], partner.worker): rate for partner, rate in zip((S1, S2), rates, strict=False)}
    return PairTerms(PairRule(load_tokens_min, most), 100, tokens_per_s, links, 800, {})


@pytest.mark.parametrize(
    ("free_blocks", "block_tokens", "helped"),
    [((50, 0), 16, S1), ((49, 50), 16, S2), ((49, 49), 16, None), ((0, 0), None, S1), ((), 16, S1)],
)
def test_a_source_that_has_no_room_for_what_waits_gets_no_partner(
    free_blocks: tuple[int, ...], block_tokens: int | None, helped: Partner | None
) -> None:
    """All requests of a pair decode at the source. 800 prompt tokens wait for it."""
    known = dict(zip((S1.worker, S2.worker), free_blocks, strict=False))
    rule = PairRule(load_tokens_min=0, block_tokens=block_tokens)
    of = PairTerms(rule, 100, 10, {}, 800, known)
    plan = make_plan(request(copies(W[0]), [W[1]]), singles(2), "chain")
    (choice,) = choose_pairings(plan, "zigzag", 0, [S1, S2], of)
    assert choice.gives_to == ((helped,) if helped else ())
    if helped is None:
        words = "alone: 800 prompt tokens wait for a pair, and w20.0 has room for KV of 784 tokens"
        assert choice.reason == words


@pytest.mark.parametrize(
    ("of", "helped", "words"),
    [
        # The load takes 26.8 s, KV of 10 tokens/s is 1000 bytes/s.
        (terms(10, 1667, 9), S1, "helps instance 201"),
        (
            terms(10, 1663, 9),
            None,
            "100 bytes of KV per token x 10 tokens/s are 0.60 of the link's",
        ),
        (terms(10, 100, 9), None, "are 10.00 of the link's 100 bytes/s: above 0.6"),
        (terms(10, 100), S2, "helps instance 202"),
        (terms(10, 100, 5000), S2, "helps instance 202"),
        (terms(10, 100, 200), None, "are 10.00 of the link's 100 bytes/s"),
        (terms(10, 100, most=None), S1, "helps instance 201"),
        (terms(10, load_tokens_min=268), S1, "helps instance 201"),
        (terms(10, load_tokens_min=269), None, "26844 ms, 268 prompt tokens at 10/s: below 269"),
        (terms(None, 1, load_tokens_min=1 << 40), S1, "helps instance 201"),
    ],
)
def test_a_partner_only_where_a_pair_pays(
    of: PairTerms, helped: Partner | None, words: str
) -> None:
    """A load of a few Runs at least, and a link that carries the KV; unknown rates speak against
    nothing. Who gets no partner works alone."""
    plan = make_plan(request(copies(W[0]), [W[1]]), singles(2), "chain")
    (choice,) = choose_pairings(plan, "zigzag", 0, [S1, S2], of)
    assert (choice.live_order, choice.gives_to) == ("zigzag", (helped,) if helped else ())
    assert words in choice.reason
    assert choice.reason.startswith("helps" if helped else "alone: ")


@given(
    sources=st.integers(1, 3),
    targets=st.integers(1, 6),
    overloaded=st.integers(0, 8),
    strategy=st.sampled_from(["chain", "tree", "unicast", "binomial", "auto"]),
)
def test_everybody_is_in_one_pair_and_those_who_send_on_come_last(
    sources: int, targets: int, overloaded: int, strategy: str
) -> None:
    asked = request(copies(*W[:sources]), W[sources : sources + targets], layers=(1 << 20,) * 8)
    plan = make_plan(asked, singles(sources + targets), strategy)
    needy = [Partner(300 + n, W[30 + n]) for n in range(overloaded)]
    choices = choose_pairings(plan, "zigzag", 0, needy)
    assert [c.live_order for c in choices] == ["zigzag"] * targets, "all are live"
    helped = sorted(partner for c in choices for partner in c.gives_to)
    assert helped == needy[:targets], "those who need it most, once each"
    helpers = [i for i, choice in enumerate(choices) if choice.gives_to]
    assert len(helpers) == len(helped), "each helps one"
    free = free_instances(plan)
    idle = [i for i in range(targets) if i not in helpers]
    assert not [i for i in idle if i in free] or all(i in free for i in helpers)
    order = live_order_of(plan)
    assert sorted(order) == list(range(targets))


# -- the controller -------------------------------------------------------------------------------


def notices(commands: list[AnyCommand]) -> list[tuple[WorkerRef | None, str]]:
    return [
        (c.gives_to[0].worker if c.gives_to else None, c.reason)
        for c in commands
        if isinstance(c, Paired)
    ]


def pairings_of(commands: list[AnyCommand]) -> list[tuple[str | None, tuple[Partner, ...]]]:
    duties = [order.duty for order in loads_of(commands) if order.duty is not None]
    return [(duty.live_order, duty.gives_to) for duty in duties]


def dispatched(commands: list[AnyCommand]) -> list[tuple[str, int]]:
    return [(c.request, c.instance) for c in commands if isinstance(c, Dispatch)]


def taken(
    requests: tuple[tuple[str, int], ...],
    worker: WorkerRef = W[0],
    instance: int = 101,
    moves: int = 1,
) -> BatchTaken:
    moved = tuple((request, attempt, moves) for request, attempt in requests)
    return BatchTaken(instance, worker, 2, moved, 1, 10, 100, 5)


def live_pair(**config: Any) -> Controller:
    """Instance 101 on w0 runs "s1" and "s2"; instance 2 on w1 loads for it and takes requests."""
    settings = {**LIVE, "dispatched_ahead_max": 2, **config}
    controller = serving(workers=2, instances=1, instances_max=2, **settings)
    commands = step(controller, 1, arrived("s1", 800), arrived("s2", 800))
    assert pairings_of(commands)[0] == ("zigzag", (Partner(101, W[0]),))
    assert dispatched(commands) == [("s1", 101), ("s2", 101)]
    assert step(controller, 2, LiveStarted(TARGET)) == []
    return controller


def test_a_cold_start_is_live_and_alone() -> None:
    controller = make_controller(workers=2, **LIVE)
    commands = step(controller, 0, *joined(W[0], W[1]))
    assert notices(commands) == [(None, "alone: no instance is overloaded")]
    assert pairings_of(commands) == [("zigzag", ())]
    assert step(controller, 1, arrived("r")) == [], "it knows nothing of its instance yet"
    target = HoldingId(1, W[0])
    assert dispatched(step(controller, 2, LiveStarted(target))) == [("r", 2)]
    assert step(controller, 3, *loaded(target)) == []


def test_stop_the_world_pairs_nobody() -> None:
    controller = serving(workers=2, instances=1, live_order="stop-the-world")
    commands = step(controller, 1, arrived("r", 2500))
    assert notices(commands) == []
    assert pairings_of(commands) == [(None, ())]


def test_who_has_most_to_do_gets_the_best_helper() -> None:
    controller = serving(workers=5, instances=2, instances_max=5, **LIVE)
    # Work for two, of which instance 102 gets the longer prompt.
    step(controller, 1, arrived("a", 400), arrived("b", 500))
    commands = step(controller, 2, arrived("c", 2000))
    (plan,) = plans_of(commands)
    assert sorted(plan.routes()) == ["w0.0 -> w2.0 -> w4.0", "w1.0 -> w3.0"]
    paired = {c.instance: c.reason for c in commands if isinstance(c, Paired)}
    orders = loads_of(commands)
    workers = [order.holding.member for order in orders]
    of_worker = dict(zip(workers, map(paired.get, instances_of(orders)), strict=True))
    assert of_worker == {
        W[2]: "alone: every overloaded instance has a helper",
        W[3]: "helps instance 101, sends no parameters on",
        W[4]: "helps instance 102, sends no parameters on",
    }


def test_an_instance_that_has_a_helper_gets_no_second_one() -> None:
    controller = serving(workers=3, instances=1, instances_max=3, **LIVE)
    commands = step(controller, 1, arrived("a", 1000))
    assert pairings_of(commands) == [("zigzag", (Partner(101, W[0]),))]
    # The helper has run something: it keeps its source, though it forwards parameters now.
    layers = [LayerArrived(TARGET, layer, watermark=layer + 1) for layer in range(2)]
    step(controller, 2, LiveStarted(TARGET), FirstByteArrived(TARGET), *layers)
    commands = step(controller, 3, arrived("b", 2000))
    assert plans_of(commands)[0].routes() == ("w1.0 -> w2.0",)
    assert notices(commands) == [(None, "alone: no instance is overloaded")]


def joined_behind(**config: Any) -> tuple[Controller, HoldingId]:
    """Instance 2 on w1 helps 101 on w0, and has no layer yet. A later load reads from w1."""
    settings = {**LIVE, "live_ahead_max": 4, **config}
    controller = serving(workers=3, instances=1, instances_max=3, **settings)
    commands = step(controller, 1, arrived("a", 1000))
    assert pairings_of(commands) == [("zigzag", (Partner(101, W[0]),))]
    step(controller, 2, LiveStarted(TARGET))
    commands = step(controller, 3, arrived("b", 2000))
    assert plans_of(commands)[0].routes() == ("w1.0 -> w2.0",)
    (order,) = loads_of(commands)
    return controller, order.holding


def changed_duties(commands: list[AnyCommand]) -> list[tuple[HoldingId, tuple[Partner, ...]]]:
    return [(c.holding, c.duty.gives_to) for c in commands if isinstance(c, ChangeDuty)]


def test_a_load_that_joins_behind_a_target_takes_its_source_over() -> None:
    """Rows and KV would leave the target before the parameters of all that follow it."""
    controller, second = joined_behind()
    assert pairings_of(step(controller, 4)) == []
    target = controller.fleet.instance_on(second.member)
    assert target is not None
    assert target.duty.gives_to == (Partner(101, W[0]),)
    # Until the new one takes requests, the source pulls from where it did.
    commands = step(controller, 5, LiveStarted(second))
    assert changed_duties(commands) == [(TARGET, ())]
    assert changed_duties(step(controller, 6)) == [], "it is told once"
    commands = step(controller, 7, arrived("c"), arrived("d"))
    assert dispatched(commands) == [("c", target.id), ("d", target.id)], "not to the former one"


def test_a_target_keeps_its_source_if_the_later_one_is_lost_before_it_takes_requests() -> None:
    controller, second = joined_behind()
    assert changed_duties(step(controller, 4, WorkerLost(second.member, "gone"))) == []
    (first,) = [i for i in controller.fleet.instances.values() if i.worker == W[1]]
    assert first.duty.gives_to == (Partner(101, W[0]),)
    assert ("c", first.id) in dispatched(step(controller, 5, arrived("c")))


def test_baselines_leave_pairs_as_they_are() -> None:
    controller, second = joined_behind(pairs=None)
    assert changed_duties(step(controller, 5, LiveStarted(second))) == []


def test_a_controller_that_comes_later_tells_the_target_as_well() -> None:
    """The order was lost with the controller that gave it."""
    before = joined_behind()[0]
    orders = [held.order for copy in before.pool.copies("m") for held in copy.ranks.values()]
    successor = make_controller(workers=3, instances_max=3, epoch=1, **LIVE)
    watermarks = {W[0]: 3}
    events = [rejoined(report(o, watermarks.get(o.holding.member, 0))) for o in orders]
    assert changed_duties(step(successor, 0, *events)) == [(TARGET, ())]


def test_the_queue_goes_to_the_target_until_the_load_is_over() -> None:
    controller = live_pair(live_ahead_max=4)
    commands = step(controller, 3, *(arrived(f"r{n}") for n in range(5)))
    # Neither has started anything, and two wait at the source already.
    assert dispatched(commands) == [("r0", 2), ("r1", 2)]
    started = msgspec.structs.replace(reported(101, running=1), started=(("s1", 1),))
    assert dispatched(step(controller, 4, started)) == [("r2", 2)]
    assert dispatched(step(controller, 5, finished("s2"))) == [("r3", 2)]
    layers = [LayerArrived(TARGET, layer, watermark=layer + 1) for layer in range(3)]
    assert step(controller, 6, FirstByteArrived(TARGET), *layers[:2]) == []
    over = [layers[2], HoldingCompleted(TARGET, 60)]
    assert dispatched(step(controller, 7, *over)) == [("r4", 101)], "both are as others now"


def test_a_lost_source_leaves_the_target_to_go_on_alone() -> None:
    controller = live_pair()
    commands = step(controller, 3, WorkerLost(W[0], "gone"))
    assert dispatched(commands) == [("s1", 2), ("s2", 2)]
    assert dispatched(step(controller, 4, arrived("r"))) == [("r", 2)]


def test_a_lost_target_leaves_the_source_to_go_on_alone() -> None:
    controller = live_pair()
    assert dispatched(step(controller, 3, arrived("r"))) == [("r", 2)]
    commands = step(controller, 4, WorkerLost(W[1], "gone"), finished("s1"))
    assert dispatched(commands) == [("r", 101)]


def test_a_batch_that_was_taken_over_is_the_sources() -> None:
    controller = live_pair()
    step(controller, 3, arrived("a"), arrived("b"))
    assert step(controller, 4, taken((("a", 1), ("b", 9)))) == []
    on_source = [record.id for record in controller.router.on_worker(W[0])]
    assert on_source == ["s1", "s2", "a"], "of b another attempt was meant"
    # What the target still says of it does not count, the source's word does.
    ended: AnyEvent = RequestEnded("a", 1, Outcome.CANCELLED, worker=W[1])
    step(controller, 5, ended)
    assert controller.stale_events == 1
    step(controller, 6, msgspec.structs.replace(ended, outcome=Outcome.FINISHED, worker=W[0]))
    assert "a" not in controller.router.requests
    assert controller.stale_events == 1


@pytest.mark.parametrize("is_announced", [False, True])
def test_of_two_takers_the_later_owns_the_attempt_whichever_word_comes_first(
    is_announced: bool,
) -> None:
    """From the target to the source and back: the source's word was late."""
    controller = live_pair()
    if is_announced:
        announced = {"attempt": 1, "worker": W[1], "moves": 2}
        step(controller, 3, msgspec.structs.replace(arrived("a"), **announced))
    else:
        step(controller, 3, arrived("a"))
        step(controller, 4, taken((("a", 1),), W[1], 2, moves=2))
    step(controller, 5, taken((("a", 1),)))
    assert [record.id for record in controller.router.on_worker(W[1])] == ["a"]
    step(controller, 6, RequestEnded("a", 1, Outcome.FINISHED, worker=W[1]))
    assert "a" not in controller.router.requests


@pytest.mark.parametrize("lost_first", [False, True])
def test_a_batch_may_be_taken_over_from_a_target_that_is_lost_by_now(lost_first: bool) -> None:
    controller = live_pair(request_attempts_max=1)
    step(controller, 3, arrived("a"))
    news = [taken((("a", 1),)), WorkerLost(W[1], "gone")]
    commands = step(controller, 4, *(reversed(news) if lost_first else news))
    assert controller.router.requests["a"].failures == 0
    assert not [c for c in commands if isinstance(c, FailRequest)]
    assert [record.id for record in controller.router.on_worker(W[0])] == ["s1", "s2", "a"]


def test_a_batch_that_waits_again_is_taken_over_if_no_newer_attempt_was_made() -> None:
    controller = live_pair()
    step(controller, 3, arrived("a"))
    # The source has no room: "a" waits again, and comes to the source by the late news.
    step(controller, 4, WorkerLost(W[1], "gone"))
    assert controller.router.waiting(controller.models["m"].entry.part) == 1
    assert step(controller, 5, taken((("a", 1),))) == []
    assert controller.router.waiting(controller.models["m"].entry.part) == 0
    step(controller, 6, finished("s1"), arrived("b"))
    assert controller.router.requests["a"].attempt == 1


def test_what_a_dead_source_took_over_is_old_news() -> None:
    controller = live_pair()
    step(controller, 3, arrived("a"))
    step(controller, 4, WorkerLost(W[0], "gone"))
    step(controller, 5, taken((("a", 1),)))
    assert controller.stale_events == 1
    assert controller.router.requests["a"].worker == W[1]


def test_what_a_failed_target_gives_back_waits_at_its_place_and_has_not_failed() -> None:
    controller = live_pair(request_attempts_max=1)
    step(controller, 3, *(arrived(name) for name in "abc"))
    back = [RequestEnded(name, 1, Outcome.RETURNED, worker=W[1]) for name in "ba"]
    commands = step(controller, 4, *back, HoldingFailed(TARGET, "no disk"), finished("s1"))
    assert dispatched(commands) == [("a", 101)], "the first of them comes first"
    assert not [c for c in commands if isinstance(c, FailRequest)]
    (failed,) = [
        c
        for c in step(controller, 5, WorkerLost(W[0], "gone"))
        if isinstance(c, FailRequest)
        if c.request == "a"
    ]
    assert failed.reason == "worker w0.0 was lost: gone"


def test_a_gateway_that_announces_a_request_again_gives_it_back() -> None:
    controller = live_pair()
    step(controller, 3, arrived("a"))
    again = RequestArrived("a", "m", 10, 5, attempt=1)
    # An older attempt is none that is under way.
    assert step(controller, 4, msgspec.structs.replace(again, attempt=0)) == []
    assert controller.stale_events == 1
    (order,) = step(controller, 5, again)
    assert order == Dispatch("a", 2, 2, W[1])
    step(controller, 6, RequestEnded("a", 1, Outcome.RETURNED, worker=W[1]))
    assert controller.stale_events == 2, "that was known"


def test_members_of_a_live_pair_are_not_drained() -> None:
    controller = serving(workers=3, instances=2, instances_max=3, **LIVE)
    commands = step(controller, 1, arrived("a", 2500))
    assert pairings_of(commands) == [("zigzag", (Partner(101, W[0]),))]
    (order,) = loads_of(commands)
    step(controller, 2, LiveStarted(order.holding), finished("a"))
    drained = []
    for number in range(2, 7):
        commands = step(controller, number * 1000 * MS)
        drained += [c.instance for c in commands if isinstance(c, Drain)]
    assert drained == [102], "instance 101 has a helper, and nobody else serves"
    commands = step(controller, 7000 * MS, *loaded(order.holding))
    assert [c.instance for c in commands if isinstance(c, Drain)] == [101]


def test_members_of_a_live_pair_make_no_room_for_others() -> None:
    models = (make_policy(most=2), make_policy("n", least=0, priority=5))
    controller = serving(workers=2, instances=1, models=models, **LIVE)
    step(controller, 1, arrived("a", 1500))
    step(controller, 2, LiveStarted(TARGET))
    assert step(controller, 3, arrived("x", 10, "n")) == []
    commands = step(controller, 4, *loaded(TARGET))
    assert [c.instance for c in commands if isinstance(c, Drain)] == [2]


def test_a_restarted_controller_takes_live_pairs_over() -> None:
    controller = make_controller(workers=2, instances_max=2, **LIVE)
    source = report(load_order(101, W[0], 6, None))
    order = load_order(2, W[1], 7, W[0])
    assert order.duty is not None
    gives_to = (Partner(101, W[0]),)
    duty = msgspec.structs.replace(order.duty, live_order="zigzag", gives_to=gives_to)
    target = report(msgspec.structs.replace(order, duty=duty), watermark=1)
    step(controller, 0, rejoined(source), rejoined(target))
    instance = controller.fleet.instances[2]
    assert (instance.state, instance.duty) == (InstanceState.LIVE, duty)
    assert dispatched(step(controller, 1, arrived("r"))) == [("r", 2)]
    running = RequestArrived("q", "m", 10, 5, attempt=3, worker=W[1])
    step(controller, 2, running, LiveStarted(order.holding))
    step(controller, 3, taken((("q", 3),)))
    assert [record.id for record in controller.router.on_worker(W[0])] == ["q"]


def test_only_rank_0_makes_an_instance_live() -> None:
    spec = ModelSpec("m", (10, 20, 30), 1, 100, tp_size=2)
    policy = msgspec.structs.replace(make_policy(), spec=spec)
    controller = make_controller(workers=2, models=(policy,), **LIVE)
    commands = step(controller, 0, *joined(W[0], W[1]))
    assert pairings_of(commands) == [("zigzag", ())] * 2
    first, second = [order.holding for order in loads_of(commands)]
    assert step(controller, 1, arrived("r"), LiveStarted(second)) == []
    assert dispatched(step(controller, 2, LiveStarted(first))) == [("r", 2)]


def test_a_record_of_a_live_pair_replays(tmp_path: Path) -> None:
    controller = make_controller(workers=2, instances_max=2, **LIVE)
    spoken: list[list[AnyEvent]] = [
        [*adopted(1), *joined(W[1])],
        [arrived("a", 800), arrived("b", 800)],
        [LiveStarted(TARGET), arrived("c")],
        [taken((("c", 1),)), LayerArrived(TARGET, 0, 1)],
        [arrived("d")],
        [RequestEnded("d", 1, Outcome.RETURNED, worker=W[1]), HoldingFailed(TARGET, "no disk")],
    ]
    lines: list[AnyLine] = [RunLine(RECORD_VERSION, "sim", controller.config)]
    for now_ns, events in enumerate(spoken):
        commands = tuple(controller.step(now_ns, events))
        lines.append(StepLine(now_ns, tuple(events), commands, now_ns))
    assert dispatched(list(lines[5].commands)) == [("d", 2)]  # type: ignore[union-attr]
    write_record(tmp_path / "record.jsonl", lines)
    assert replay(read_record(tmp_path / "record.jsonl")).steps == len(spoken)


# -- who gets what ------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 7, 32])
def test_a_pair_costs_what_the_batcher_says_it_does(layers: int) -> None:
    """The oracle is the instance's own figure: control and batching do not know each other."""
    spec = ModelSpec("m", (10,) * (layers + 2), 1, 100)
    policy = msgspec.structs.replace(make_policy(most=2), spec=spec)
    controller = serving_of(policy)
    step(controller, 1, arrived("s", 2500))
    step(controller, 2, LiveStarted(TARGET))
    for watermark in range(layers + 2):
        event = LayerArrived(TARGET, max(watermark - 1, 0), watermark)
        step(controller, 3 + watermark, event)
        (route,) = controller.pairings.routes(9, controller.models["m"].entry)
        rate, cost = pair_rate(min(max(watermark - 1, 0), layers), layers)
        assert route.cost_permille == cost * 1000 // rate


def serving_of(policy: ModelPolicy) -> Controller:
    """One instance, 101 on w0, of a model of another shape, and a spare worker."""
    controller = make_controller(workers=2, models=(policy,), **LIVE)
    span = LayerSpan(0, policy.spec.layers)
    order = msgspec.structs.replace(load_order(101, W[0], 101, None), span=span)
    there = rejoined(report(order, span.stop), DEVICE_LARGE)
    step(controller, 0, there, reported(101), WorkerJoined(W[1], DEVICE_LARGE))
    return controller


DEVICE_LARGE = msgspec.structs.replace(DEVICE, arena_bytes=1000)
