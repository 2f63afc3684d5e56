"""Queues of clients: turns, weights, and how long a request waits at most."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.client_queues import REMEMBERED_NS, ClientQueues, RecentClients

CLIENTS = ["a", "b", "c", "d"]
arrivals = st.lists(st.sampled_from(CLIENTS), max_size=30)
weights = st.fixed_dictionaries({client: st.integers(1, 4) for client in CLIENTS})


@dataclass(frozen=True)
class Record:
    id: str
    client: str
    weight: int
    order: int


def queues_of(clients: list[str], weight_of: dict[str, int]) -> ClientQueues[Record]:
    queues: ClientQueues[Record] = ClientQueues()
    for order, client in enumerate(clients):
        queues.add(Record(f"r{order}", client, weight_of[client], order))
    return queues


def serve_all(queues: ClientQueues[Record]) -> list[Record]:
    served = []
    while queues:
        record = next(queues.in_turn())
        queues.serve(record)
        served.append(record)
    return served


@given(clients=arrivals, weight_of=weights, early=st.integers(0, 10))
def test_the_order_that_is_told_is_the_one_that_is_kept(
    clients: list[str], weight_of: dict[str, int], early: int
) -> None:
    queues = queues_of(clients, weight_of)
    for _ in range(min(early, len(queues))):
        queues.serve(next(queues.in_turn()))
    told = list(queues.in_turn())
    assert serve_all(queues) == told
    assert len(queues) == 0


@given(clients=arrivals, weight_of=weights, early=st.integers(0, 10))
def test_a_request_waits_for_one_turn_of_each_other_client(
    clients: list[str], weight_of: dict[str, int], early: int
) -> None:
    queues = queues_of([client for client in clients if client != "a"], weight_of)
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
