"""Queues of clients: turns, weights, and how long a request waits at most."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.requests.client_queues import (
    REMEMBERED_NS,
    ClientQueues,
    QueueShares,
    RecentClients,
)

CLIENTS = ["a", "b", "c", "d"]
arrivals = st.lists(st.sampled_from(CLIENTS), max_size=30)
sharings = st.one_of(st.none(), st.builds(QueueShares, st.integers(1, 100), st.integers(1, 40)))
weights = st.fixed_dictionaries({client: st.integers(1, 4) for client in CLIENTS})


@dataclass(frozen=True)
class Record:
    id: str
    client: str
    weight: int
    order: int
    prompt_tokens: int = 1
    late_ns: int | None = None


NOW_NS = 100


def queues_of(
    clients: list[str], weight_of: dict[str, int], sharing: QueueShares | None = None
) -> ClientQueues[Record]:
    """Some requests are late, and of some nothing is promised."""
    queues: ClientQueues[Record] = ClientQueues(sharing)
    queues.now_ns = NOW_NS
    for order, client in enumerate(clients):
        tokens = 1 + order * 37 % 20
        late_ns = (None, NOW_NS, NOW_NS + 1)[order * 7 % 5 % 3]
        queues.add(Record(f"r{order}", client, weight_of[client], order, tokens, late_ns))
    return queues


def serve_all(queues: ClientQueues[Record]) -> list[Record]:
    served = []
    while queues:
        record = next(queues.in_turn())
        queues.serve(record)
        served.append(record)
    return served


@given(clients=arrivals, weight_of=weights, sharing=sharings, early=st.integers(0, 10))
def test_the_order_that_is_told_is_the_one_that_is_kept(
    clients: list[str], weight_of: dict[str, int], sharing: QueueShares | None, early: int
) -> None:
    queues = queues_of(clients, weight_of, sharing)
    for _ in range(min(early, len(queues))):
        queues.serve(next(queues.in_turn()))
    told = list(queues.in_turn())
    assert serve_all(queues) == told
    assert len(queues) == 0


@given(
    clients=arrivals,
    weight_of=weights,
    sharing=sharings,
    wanted=st.fixed_dictionaries({client: st.integers(0, 8) for client in CLIENTS}),
)
def test_what_a_sated_client_sent_is_left_out(
    clients: list[str],
    weight_of: dict[str, int],
    sharing: QueueShares | None,
    wanted: dict[str, int],
) -> None:
    """Of each client as many as are wanted, in the order in which all are told."""
    queues = queues_of(clients, weight_of, sharing)
    seen = dict.fromkeys(CLIENTS, 0)
    expected = []
    for record in queues.in_turn():
        seen[record.client] += 1
        expected += [record] if seen[record.client] <= wanted[record.client] else []
    sated = {client: None for client, count in wanted.items() if not count}
    told = []
    for record in queues.in_turn(sated):
        told.append(record)
        if sum(other.client == record.client for other in told) == wanted[record.client]:
            sated[record.client] = None
    assert told == expected


@given(clients=arrivals, weight_of=weights, sharing=sharings, early=st.integers(0, 10))
def test_a_request_waits_for_one_turn_of_each_other_client(
    clients: list[str], weight_of: dict[str, int], sharing: QueueShares | None, early: int
) -> None:
    queues = queues_of([client for client in clients if client != "a"], weight_of, sharing)
    for _ in range(min(early, len(queues))):
        queues.serve(next(queues.in_turn()))
    queues.add(Record("mine", "a", weight_of["a"], 1000))
    before = [record.id for record in serve_all(queues)].index("mine")
    assert before <= sum(weight for client, weight in weight_of.items() if client != "a")


@given(clients=arrivals, weight_of=weights)
def test_of_one_client_the_first_to_come_is_the_first_to_go(
    clients: list[str], weight_of: dict[str, int]
) -> None:
    served = serve_all(queues_of(clients, weight_of))
    assert len(served) == len(clients)
    for client in CLIENTS:
        orders = [record.order for record in served if record.client == client]
        assert orders == sorted(orders)


tokens_of_prompts = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(prompts=tokens_of_prompts, percent=st.integers(1, 99), run_tokens=st.integers(1, 60))
def test_the_oldest_and_the_shortest_share_runs(
    prompts: list[int], percent: int, run_tokens: int
) -> None:
    """A request waits for no more than the Runs in which it and those before it have their share,
    and one prompt; what else goes is the shortest."""
    queues: ClientQueues[Record] = ClientQueues(QueueShares(percent, run_tokens=run_tokens))
    for order, tokens in enumerate(prompts):
        queues.add(Record(f"r{order}", "a", 1, order, tokens))
    share = ceil(run_tokens * percent / 100)
    served_tokens = 0
    while queues:
        record, waiting = next(queues.in_turn()), list(queues)
        queues.serve(record)
        earlier = prompts[: record.order + 1]
        runs = sum(ceil(tokens / share) for tokens in earlier)
        assert served_tokens <= runs * run_tokens + max(prompts)
        served_tokens += record.prompt_tokens
        if record is not waiting[0]:
            assert record.prompt_tokens == min(other.prompt_tokens for other in waiting)


@given(
    lates=st.lists(st.booleans(), min_size=1, max_size=40),
    prompts=st.data(),
    percent=st.integers(1, 99),
)
def test_what_is_late_goes_behind_what_is_not_but_for_its_share(
    lates: list[bool], prompts: st.DataObject, percent: int
) -> None:
    """Every second turn of the oldest may be that of a late one; all others are of those that can
    still be in time, while there are some. Of these the oldest and the shortest go."""
    queues: ClientQueues[Record] = ClientQueues(QueueShares(percent, run_tokens=60))
    queues.now_ns = NOW_NS
    for order, is_late in enumerate(lates):
        tokens = prompts.draw(st.integers(1, 50))
        late_ns = NOW_NS if is_late else NOW_NS + 1
        queues.add(Record(f"r{order}", "a", 1, order, tokens, late_ns))
    turns = 0
    while queues:
        record, waiting = next(queues.in_turn()), list(queues)
        timely = [other for other in waiting if other.late_ns != NOW_NS]
        queues.serve(record)
        if record not in timely and timely:
            assert record is waiting[0], "only the oldest of all passes those in time"
            turns += 1
            assert turns <= 1, "and not twice in a row"
        else:
            turns = 0
        if record in timely:
            shortest = min(other.prompt_tokens for other in timely)
            assert record is timely[0] or record.prompt_tokens == shortest


@given(st.integers(2, 30))
def test_a_late_request_is_served_while_others_keep_coming(count: int) -> None:
    """An endless line of requests in time, all alike: of the tokens a late one gets a quarter."""
    queues: ClientQueues[Record] = ClientQueues(QueueShares(50, run_tokens=2))
    queues.now_ns = NOW_NS
    for order in range(count):
        queues.add(Record(f"late{order}", "a", 1, order, 1, NOW_NS))
    served = 0
    for order in range(count, 100 * count):
        queues.add(Record(f"r{order}", "a", 1, order, 1, NOW_NS + 1))
        record = next(queues.in_turn())
        queues.serve(record)
        served += 1
        if not any(other.late_ns == NOW_NS for other in queues):
            break
    assert served <= 4 * count + 4


def test_a_backlog_is_served_as_one_instance_would() -> None:
    """Half of a Run is the oldest prompt's, also if hundreds wait: the oldest ones take no more
    then, and most short prompts go before most long ones."""
    queues: ClientQueues[Record] = ClientQueues(QueueShares(50, run_tokens=2000))
    for order in range(400):
        queues.add(Record(f"r{order}", "a", 1, order, 500 if order % 2 else 4000))
    served = serve_all(queues)
    # A long prompt takes four Runs, and leaves half of their tokens to eight short ones.
    last_short = max(number for number, r in enumerate(served) if r.prompt_tokens == 500)
    assert 200 // 8 <= sum(r.prompt_tokens == 4000 for r in served[:last_short]) <= 200 // 8 + 1


@given(
    steps=st.lists(st.tuples(st.sampled_from("aaacr"), st.integers(1, 50)), max_size=60),
    percent=st.integers(1, 100),
    passes_max=st.integers(1, 5),
)
def test_a_request_is_passed_a_bounded_number_of_times(
    steps: list[tuple[str, int]], percent: int, passes_max: int
) -> None:
    """By later ones of its client, while it waits at a stretch. Requests arrive, are cancelled, and
    come back after they were served."""
    queues: ClientQueues[Record] = ClientQueues(QueueShares(percent, passes_max))
    passes: dict[str, int] = {}
    served: list[Record] = []
    for order, (step, number) in enumerate(steps):
        waiting = list(queues)
        if step == "c" and waiting:
            queues.remove(waiting[number % len(waiting)])
        elif step == "r" and served:
            record = served.pop(number % len(served))
            passes[record.id] = 0
            queues.add(record)
        else:
            queues.add(Record(f"r{order}", "a", 1, order, number))
            passes[f"r{order}"] = 0
        if number % 2 and queues:
            record = next(queues.in_turn())
            assert queues.due_before(record) is None
            queues.serve(record)
            served.append(record)
            for other in queues:
                passes[other.id] += other.order < record.order
                assert passes[other.id] <= passes_max


def test_a_request_that_comes_back_has_its_old_place() -> None:
    queues = queues_of(["a", "a", "a"], {"a": 1})
    first = next(queues.in_turn())
    queues.serve(first)
    queues.add(first)
    assert [record.id for record in queues.in_turn()] == ["r0", "r1", "r2"]


def test_clients_are_forgotten_after_a_while() -> None:
    recent = RecentClients()
    recent.saw("a", 0)
    assert not recent.has_others("a", 1)
    assert recent.has_others("b", 1)
    recent.saw("b", 2)
    assert recent.has_others("a", REMEMBERED_NS)
    assert not recent.has_others("b", REMEMBERED_NS + 1)
    assert not recent.has_others("a", REMEMBERED_NS + 2)
