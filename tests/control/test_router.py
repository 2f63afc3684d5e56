"""Router: order, bounds and choice."""

from __future__ import annotations

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from effort import examples
from livescale.control.requests.client_queues import REMEMBERED_NS
from livescale.control.requests.router import Assignment, ClientShare, Router
from livescale.control.requests.router_rows import RequestRecord
from livescale.messages.events import InstanceReported
from livescale.values.bindings import Binding, EarlyBinding, LateBinding
from livescale.values.routes import Does, Hop, PairProgress, Partner, Route
from livescale.values.types import LayerSpan, Part, WorkerRef

M = Part("m", LayerSpan(0, 3))
W = [WorkerRef(number) for number in range(4)]
AHEAD = 2
AVOID_NS = 5
CLIENTS = ["a", "b", "c"]


def to(instance: int, worker: WorkerRef) -> Route:
    """To an instance that serves."""
    return Route((Hop((Partner(instance, worker),), M.span),))


def alone(instance: int, worker: WorkerRef, lag_tokens: int) -> Route:
    """To a loading instance without a partner."""
    return Route((Hop((Partner(instance, worker),), None),), lag_tokens=lag_tokens)


def pair(target: WorkerRef, source: WorkerRef, cost_permille: int = 1000) -> Route:
    """To a loading instance, 20, from which another one, 21, pulls."""
    first = Hop((Partner(20, target),), None, Does.PREFILL)
    return Route((first, Hop((Partner(21, source),), None)), cost_permille)


def assigned(router: Router, now_ns: int = 0, count: int = 3) -> list[tuple[str, int]]:
    routes = [to(10 + number, W[number]) for number in range(count)]
    return [(a.request.id, a.instance) for a in router.assign(now_ns, M, routes)]


def test_least_outstanding_work_first_then_the_lower_id() -> None:
    router = Router(8)
    for number, tokens in enumerate([50, 10, 10, 10]):
        router.arrive(f"r{number}", M, tokens)
    assert assigned(router) == [("r0", 10), ("r1", 11), ("r2", 12), ("r3", 11)]


def reported(queued_tokens: int, begun_tokens: int = 0, left_out: int = 0) -> InstanceReported:
    return InstanceReported(
        instance=10,
        started=(),
        running=0,
        queued_prefill_tokens=queued_tokens,
        kv_blocks_used=0,
        kv_blocks=100,
        emitted_tokens=0,
        left_out=left_out,
        begun_prompt_tokens=begun_tokens,
    )


LATE = LateBinding(ahead_tokens_max=100)


def test_of_equals_the_one_that_was_given_a_request_longest_ago_comes_first() -> None:
    """Both compute a prompt of the same length: that one is done sooner. What it reports of a Run
    that goes on does not say how far that is."""
    router = Router(64, binding=LateBinding())
    for name, due in (("r0", 0), ("r1", 1), ("r2", 2)):
        router.arrive(name, M, 60)
        assert assigned(router) == [(name, 10 + due)]
    for number in (1, 0, 2):
        router.end(router.requests[f"r{number}"])
        router.arrive(f"r{3 + number}", M, 60)
        assert assigned(router) == [(f"r{3 + number}", 10 + number)], "it has nothing"
    for name, due in (("r6", 1), ("r7", 0), ("r8", 2), ("r9", 1)):
        router.arrive(name, M, 60)
        assert assigned(router) == [(name, 10 + due)]


def test_an_instance_holds_few_tokens_that_are_not_computed() -> None:
    router = Router(64, binding=LATE)
    for number, tokens in enumerate([60, 40, 40, 250, 10]):
        router.arrive(f"r{number}", M, tokens)
    # After r0 come as many tokens of the shortest ones.
    assert assigned(router, count=1) == [("r0", 10), ("r4", 10)]
    router.progressed(W[0], reported(30, begun_tokens=40))
    assert assigned(router, count=1) == [("r1", 10)]
    router.start("r0", 1)
    router.start("r4", 1)
    router.progressed(W[0], reported(40))
    assert assigned(router, count=1) == [("r2", 10)]
    router.start("r1", 1)
    router.progressed(W[0], reported(40))
    assert assigned(router, count=1) == [], "r3 is for an instance that has nothing else"
    router.start("r2", 1)
    router.progressed(W[0], reported(0))
    assert assigned(router, count=1) == [("r3", 10)]


def test_what_an_instance_reports_counts_where_it_is_more() -> None:
    router = Router(64, binding=LATE)
    record = router.arrive("r0", M, 10)
    record.is_admitted = record.is_started = True
    router.place(record, W[0])
    router.arrive("r1", M, 50)
    router.progressed(W[0], reported(60))
    assert assigned(router, count=1) == []
    router.progressed(W[0], reported(50))
    assert assigned(router, count=1) == [("r1", 10)]


def test_an_instance_that_left_requests_out_gets_no_more() -> None:
    router = Router(64, binding=LATE)
    router.arrive("r0", M, 1)
    assert assigned(router, count=1) == [("r0", 10)]
    router.progressed(W[0], reported(1, left_out=1))
    router.arrive("r1", M, 1)
    assert assigned(router, count=1) == []
    assert router.left_over(M) == 1
    assert assigned(router, count=2) == [("r1", 11)]


def test_prompts_that_wait_for_others_lack_no_place() -> None:
    router = Router(64, binding=LATE)
    for number in range(3):
        router.arrive(f"r{number}", M, 100)
    assert assigned(router, count=1) == [("r0", 10)]
    assert (router.waiting(M), router.left_over(M)) == (2, 0)
    assert assigned(router, count=0) == []
    assert router.left_over(M) == 2


def test_a_long_prompt_keeps_one_instance_free_of_others() -> None:
    router = Router(64, binding=LateBinding(ahead_tokens_max=100, oldest_prompt_percent=100))
    for number, tokens in enumerate([90, 50, 300, 10, 10]):
        router.arrive(f"r{number}", M, tokens)
    # The third one waits for instance 11, which will be free first.
    assert assigned(router, count=2) == [("r0", 10), ("r1", 11), ("r3", 10)]
    router.start("r0", 1)
    assert assigned(router, count=2) == [("r4", 11)]
    router.start("r3", 1)
    assert assigned(router, count=2) == [("r2", 10)]


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    serving=st.integers(1, 3),
    waking=st.integers(1, 6),
)
def test_what_is_the_part_of_waking_instances_waits_for_them(
    prompts: list[int], serving: int, waking: int
) -> None:
    """Each instance gets no more than its part, or one request; with the others there the rest of
    the burst is dealt out as if all had been there."""
    router = Router(64, binding=LateBinding(ahead_tokens_max=10_000))
    for number, tokens in enumerate(prompts):
        router.arrive(f"r{number}", M, tokens)
    routes = [to(10 + number, W[number]) for number in range(serving)]
    share = ceil(sum(prompts) / (serving + waking))
    held: dict[int, list[int]] = {}
    for assignment in router.assign(0, M, routes, waking):
        tokens = assignment.request.prompt_tokens
        held.setdefault(assignment.instance, []).append(tokens)
    assert all(len(sizes) == 1 or sum(sizes) <= share for sizes in held.values())
    assert len(held) == min(serving, len(prompts))
    router.assign(0, M, routes)
    assert not router.waiting(M)


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    new=st.integers(1, 3),
    run_tokens=st.integers(20, 60),
)
def test_new_instances_get_their_part_of_a_burst(
    prompts: list[int], new: int, run_tokens: int
) -> None:
    """What waits when they come goes to whichever comes free, so that no instance has more than two
    Runs, and no instance is idle while prompts wait."""
    router = Router(64, binding=LateBinding(ahead_tokens_max=2 * run_tokens))
    for number, tokens in enumerate(prompts):
        router.arrive(f"r{number}", M, tokens)
    first = assigned(router, count=1)
    sizes = [router.requests[request].prompt_tokens for request, _ in first]
    assert len(sizes) == 1 or sum(sizes) <= 2 * run_tokens
    later = assigned(router, count=1 + new)
    for number in range(1, 1 + new):
        got = [router.requests[r].prompt_tokens for r, instance in later if instance == 10 + number]
        assert len(got) <= 1 or sum(got) <= 2 * run_tokens
        assert got or not router.waiting(M)
    ends = 0
    while router.requests:
        for worker in W[: 1 + new]:
            assert router.on_worker(worker) or not router.waiting(M)
            for record in router.on_worker(worker)[:1]:
                router.start(record.id, record.attempt)
                router.end(record)
                ends += 1
        assigned(router, count=1 + new)
    assert ends == len(prompts)


def test_an_instance_holds_few_requests_that_it_has_not_started() -> None:
    router = Router(2)
    for number in range(5):
        router.arrive(f"r{number}", M, 1)
    assert assigned(router, count=1) == [("r0", 10), ("r1", 10)]
    assert assigned(router, count=1) == []
    router.start("r0", 9)
    assert assigned(router, count=1) == [], "another attempt was started"
    router.start("r0", 1)
    assert assigned(router, count=1) == [("r2", 10)]


def test_a_retried_request_goes_before_those_that_came_later() -> None:
    router = Router(1)
    first = router.arrive("r0", M, 1)
    router.arrive("r1", M, 1)
    assert assigned(router, count=1) == [("r0", 10)]
    router.retry(first)
    assert assigned(router, count=1) == [("r0", 10)]
    assert first.attempt == 2


def given_out(router: Router, count: int, *live: Route) -> list[tuple[str, int]]:
    routes = [*(to(10 + number, W[number]) for number in range(count)), *live]
    return [(a.request.id, a.instance) for a in router.assign(0, M, routes)]


def test_a_pair_is_chosen_by_what_both_have_and_how_fast_both_are() -> None:
    router = Router(8, binding=EarlyBinding())
    for number, tokens in enumerate([100, 30, 30, 10, 10]):
        router.arrive(f"r{number}", M, tokens)
    both = pair(W[1], W[2], cost_permille=500)
    # r0 goes to instance 10. The pair has 30 and 60 tokens, which cost it half, and so on.
    assert given_out(router, 1, both) == [
        ("r0", 10),
        ("r1", 20),
        ("r2", 20),
        ("r3", 20),
        ("r4", 20),
    ]
    router.move(router.requests["r1"], W[2])
    assert (router.outstanding_tokens(W[1]), router.outstanding_tokens(W[2])) == (50, 30)
    for number in range(3):
        router.arrive(f"s{number}", M, 60)
    assert given_out(router, 1, both) == [("s0", 20), ("s1", 20), ("s2", 10)]


def test_a_pair_may_have_more_that_neither_has_started() -> None:
    router = Router(1, live_ahead_max=3)
    for number in range(6):
        router.arrive(f"r{number}", M, 1)
    both = pair(W[1], W[0])
    assert given_out(router, 1) == [("r0", 10)]
    assert given_out(router, 0, both) == [("r1", 20), ("r2", 20)]
    router.move(router.requests["r1"], W[0])
    assert router.requests["r1"].is_admitted
    assert given_out(router, 0, both) == [("r3", 20)]


def test_a_loading_instance_alone_gets_what_would_wait_longer_for_others() -> None:
    router = Router(1)
    for number in range(5):
        router.arrive(f"r{number}", M, 100)
    loading = alone(20, W[1], lag_tokens=250)
    # Instance 10 is full with r0, and by the time that r2 is done everything is loaded.
    assert given_out(router, 1, loading) == [("r0", 10), ("r3", 20), ("r4", 20)]
    assert [r.id for r in router.requests.values() if r.worker is None] == ["r1", "r2"]
    router.end(router.requests["r0"])
    assert given_out(router, 1, loading) == [("r1", 10)]


def test_a_loading_instance_is_bound_to_what_it_computes_until_it_has_everything() -> None:
    """And two Runs more: what comes behind that can still go to others."""
    router = Router(8, binding=LateBinding(ahead_tokens_max=200))
    for number in range(9):
        router.arrive(f"r{number}", M, 100)
    one = Route((Hop((Partner(20, W[1]),), None),), lag_tokens=300, ahead_tokens=300)
    assert given_out(router, 0, one) == [(f"r{number}", 20) for number in range(5)]
    first = Hop((Partner(20, W[1]),), None, Does.PREFILL)
    two = Route(
        (first, Hop((Partner(21, W[2]),), None)), pair=PairProgress(0, 4, 300), ahead_tokens=300
    )
    router.arrive("other", M, 200)
    router.place(router.requests["other"], W[0])
    # Instance 10 is full, and could take some of them later.
    assert given_out(router, 1, two) == [("r5", 20), ("r6", 20)], "both have two Runs"
    assert router.waiting(M) == 2


def test_a_pair_without_others_gets_more_than_one_instance_computes_while_it_loads() -> None:
    """What waits could go nowhere else, and its target runs ahead on all that it has."""
    router = Router(8, live_ahead_max=20, binding=LateBinding(ahead_tokens_max=200))
    for number in range(20):
        router.arrive(f"r{number}", M, 100)
    hops = (Hop((Partner(20, W[1]),), None, Does.PREFILL), Hop((Partner(21, W[2]),), None))
    pair = Route(hops, pair=PairProgress(0, 4, 600), ahead_tokens=600)
    # Two Runs for each, and one and a half times what one instance computes.
    assert len(given_out(router, 0, pair)) == 4 + 9


def test_what_comes_late_to_a_pair_goes_where_it_is_done_sooner() -> None:
    """The pair is as fast as one at first, and as two when all of its layers are there."""
    router = Router(8, live_ahead_max=20, binding=LateBinding(ahead_tokens_max=2000))
    for number in range(12):
        router.arrive(f"r{number}", M, 100)
    first = Hop((Partner(20, W[1]),), None, Does.PREFILL)
    hops = (first, Hop((Partner(21, W[2]),), None))
    both = Route(hops, pair=PairProgress(0, 4, 400), ahead_tokens=400)
    given = given_out(router, 0, both, alone(30, W[3], lag_tokens=400))
    # Two instances compute 800 tokens in the time of 400. With a ninth prompt they take longer than
    # the load, and those behind it are done sooner by the other one.
    assert [instance for _, instance in given] == [20] * 9 + [30] * 3


def test_loading_instances_share_evenly_when_nobody_serves() -> None:
    router = Router(1)
    for number in range(4):
        router.arrive(f"r{number}", M, 100)
    both = [alone(20 + number, W[number], lag_tokens=1 << 40) for number in range(2)]
    assert given_out(router, 0, *both) == [("r0", 20), ("r1", 21), ("r2", 20), ("r3", 21)]


def test_an_avoided_worker_is_left_alone_for_a_while() -> None:
    router = Router(8)
    record = router.arrive("r0", M, 1)
    router.arrive("r1", M, 1)
    record.avoided, record.avoided_until_ns = (W[0],), 5
    assert assigned(router, 4, count=1) == [("r1", 10)], "others are not held up"
    assert assigned(router, 5, count=1) == [("r0", 10)]


def test_requests_that_waited_too_long_let_others_go_first() -> None:
    """Until then the order is that of arrival; later the late ones come behind the others, but for
    every second turn of the oldest."""
    router = Router(1)
    for number in range(8):
        router.arrive(f"early{number}", M, 1500, now_ns=0, wait_ns=10)
        router.arrive(f"later{number}", M, 1500, now_ns=5, wait_ns=10)
    assert [request for request, _ in assigned(router, 9, count=2)] == ["early0", "later0"]
    served = []
    while router.waiting(M):
        for record in [r for r in router.requests.values() if r.worker is not None]:
            router.end(record)
        served += [request for request, _ in assigned(router, 12, count=1)]
    assert served[0] == "later1"
    assert [name for name in served if name < "l"] == [f"early{n}" for n in range(1, 8)]
    assert [name for name in served if name > "l"] == [f"later{n}" for n in range(1, 8)]
    late_meanwhile = sum(name < "l" for name in served[: served.index("later7")])
    assert 1 <= late_meanwhile <= 3


def test_a_client_with_many_requests_does_not_take_the_turns_of_others() -> None:
    router = Router(1)
    for number in range(100):
        router.arrive(f"many{number}", M, 1, client=ClientShare("many"))
    router.arrive("few", M, 1, client=ClientShare("few"))
    assert assigned(router, count=2) == [("many0", 10), ("few", 11)]


def test_a_turn_is_worth_the_weight_of_the_client() -> None:
    router = Router(100)
    for number in range(4):
        router.arrive(f"a{number}", M, 1, client=ClientShare("a", 3))
        router.arrive(f"b{number}", M, 1, client=ClientShare("b"))
    order = [request for request, _ in assigned(router, count=1)]
    assert order == ["a0", "a1", "a2", "b0", "a3", "b1", "b2", "b3"]


@given(st.lists(st.sampled_from(["found a", "found b", "assign"]), max_size=20))
def test_what_is_found_under_way_uses_up_no_turn(steps: list[str]) -> None:
    """A gateway that announces late which of its requests run since an earlier life."""
    router = Router(1)
    for number in range(20):
        for name in ("a", "b"):
            router.arrive(f"{name}{number}", M, 1, client=ClientShare(name))
    served = []
    for number, step in enumerate(steps):
        if step == "assign":
            ((request, _),) = assigned(router, count=1)
            router.end(router.requests[request])
            served.append(request[0])
        else:
            client = ClientShare(step.removeprefix("found "))
            router.found(router.arrive(f"old{number}", M, 1, client=client), W[2])
            router.validate()
    assert served == [("a", "b")[number % 2] for number in range(len(served))]


def test_one_client_does_not_get_all_places_beside_others() -> None:
    router = Router(16, places=8)
    for number in range(20):
        router.arrive(f"many{number}", M, 1, client=ClientShare("many"), now_ns=1)
    assert len(assigned(router, 2, count=1)) == 16, "alone it may have all, and some ahead"
    for number in range(12):
        router.end(router.requests[f"many{number}"])
    router.arrive("few0", M, 1, client=ClientShare("few"), now_ns=3)
    got = [request for request, _ in assigned(router, 4, count=1)]
    assert got == ["many16", "few0", "many17", "many18"], "seven of eight places, and no more"
    router.end(router.requests["few0"])
    assert assigned(router, 5, count=1) == []
    later_ns = 4 + REMEMBERED_NS
    assert assigned(router, later_ns, count=1) == [("many19", 10)], "the other one is forgotten"


def test_nothing_is_left_of_a_part_that_is_forgotten() -> None:
    """A model that is published again under its name begins anew."""
    router = Router(16, places=8)
    for name in ("few", "many"):
        router.end(router.arrive(name, M, 1, client=ClientShare(name)))
    router.forget_part(M)
    for number in range(8):
        router.arrive(f"many{number}", M, 1, client=ClientShare("many"))
    assert len(assigned(router, count=1)) == 8, "nobody else is known"


TOKENS_MAX = 60


class RouterMachine(RuleBasedStateMachine):
    """Requests come, go, fail; what is waiting or dispatched is never lost or doubled."""

    binding: Binding = EarlyBinding(AHEAD)

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(AHEAD, binding=self.binding)
        self.now_ns = 0
        self.records: dict[str, RequestRecord] = {}
        self.arrivals = 0

    @rule(tokens=st.integers(1, 90), client=st.sampled_from(CLIENTS))
    def arrive(self, tokens: int, client: str) -> None:
        self.arrivals += 1
        request = f"r{self.arrivals}"
        self.records[request] = self.router.arrive(
            request, M, tokens, now_ns=self.now_ns, client=ClientShare(client)
        )

    @rule(tokens=st.integers(1, 90), client=st.sampled_from(CLIENTS), data=st.data())
    def find(self, tokens: int, client: str, data: st.DataObject) -> None:
        """A gateway announces a request that an earlier life gave to a worker."""
        self.arrive(tokens, client)
        record = self.records[f"r{self.arrivals}"]
        self.router.found(record, data.draw(st.sampled_from(W)))
        assert record.is_started

    @rule(chosen=st.lists(st.sampled_from([0, 1, 2, 3]), unique=True))
    def assign(self, chosen: list[int]) -> None:
        before = [r for r in self.records.values() if r.worker is None]
        attempts = {r.id: r.attempt for r in before}
        held = {number: self.ahead(W[number]) for number in chosen}
        routes = [to(number, W[number]) for number in sorted(chosen)]
        got = self.router.assign(self.now_ns, M, routes)
        self.check_turns([a.request for a in got])
        for a in got:
            assert a.request.attempt == attempts[a.request.id] + 1
            assert a.request.worker == a.worker == W[a.instance]
        self.check_order(got)
        waiting = [r for r in self.records.values() if r.worker is None]
        for number in chosen:
            ahead = self.ahead(W[number])
            assert len(ahead) <= max(AHEAD, len(held[number]))
            # Nobody waits while an instance has room, except who avoids it.
            assert not self.has_room(ahead) or all(W[number] in r.avoided for r in waiting)
        assert self.router.assign(self.now_ns, M, routes) == []

    def ahead(self, worker: WorkerRef) -> list[RequestRecord]:
        return [r for r in self.router.on_worker(worker) if not r.is_admitted]

    def has_room(self, ahead: list[RequestRecord]) -> bool:
        return len(ahead) < AHEAD

    def check_order(self, got: list[Assignment]) -> None:
        for client in CLIENTS:
            orders = [a.request.order for a in got if a.request.client == client]
            assert orders == sorted(orders), "of one client, first come, first served"

    def check_turns(self, served: list[RequestRecord]) -> None:
        """Of two clients that wait, neither is more than a turn ahead. One whose request avoids a
        worker may lose a turn by that."""
        waiting = [r for r in self.records.values() if r.worker is None]
        passed = [record.client for record in waiting if record.avoided]
        clients = dict.fromkeys(record.client for record in waiting)
        for client in [client for client in clients if client not in passed]:
            own = sum(record.client == client for record in served)
            for other in CLIENTS:
                assert sum(record.client == other for record in served) <= own + 1

    @precondition(lambda self: any(r.worker for r in self.records.values()))
    @rule(data=st.data(), how=st.sampled_from(["admit", "start", "move", "retry", "avoid", "end"]))
    def progress(self, data: st.DataObject, how: str) -> None:
        out = sorted(r.id for r in self.records.values() if r.worker is not None)
        record = self.records[data.draw(st.sampled_from(out))]
        if how == "admit":
            self.router.admit(record.id, record.attempt)
        elif how == "start":
            self.router.start(record.id, record.attempt)
            assert record.is_admitted
        elif how == "move":
            self.router.move(record, data.draw(st.sampled_from(W)))
            assert record.is_admitted
        elif how == "end":
            self.router.end(self.records.pop(record.id))
        else:
            if how == "avoid":
                assert record.worker is not None
                record.avoided += (record.worker,)
                record.avoided_until_ns = self.now_ns + AVOID_NS
            self.router.retry(record)

    @rule(gap_ns=st.integers(0, 2 * AVOID_NS))
    def wait(self, gap_ns: int) -> None:
        self.now_ns += gap_ns

    @precondition(lambda self: any(r.worker is None for r in self.records.values()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        waiting = sorted(r.id for r in self.records.values() if r.worker is None)
        self.router.end(self.records.pop(data.draw(st.sampled_from(waiting))))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.router.validate()
        assert self.router.requests == self.records
        waiting = [r for r in self.records.values() if r.worker is None]
        assert self.router.waiting(M) == len(waiting)
        assert self.router.waiting_tokens(M) == sum(r.prompt_tokens for r in waiting)


class LateRouterMachine(RouterMachine):
    """The same where an instance gets what it computes next."""

    binding = LateBinding(TOKENS_MAX, 50, 3)

    def ahead(self, worker: WorkerRef) -> list[RequestRecord]:
        return [r for r in self.router.on_worker(worker) if not r.is_started]

    def has_room(self, ahead: list[RequestRecord]) -> bool:
        return not ahead

    def check_order(self, got: list[Assignment]) -> None:
        for number in range(len(W)):
            new = [a.request for a in got if a.instance == number]
            tokens = sum(r.prompt_tokens for r in self.ahead(W[number]))
            assert not new or tokens <= TOKENS_MAX or self.ahead(W[number]) == new[:1]


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestLateRouterMachine = LateRouterMachine.TestCase
TestLateRouterMachine.settings = settings(max_examples=examples(80), stateful_step_count=40)
