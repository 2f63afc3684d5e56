"""Hosts that want to leave: told once, and let go when all of their members may go."""

from __future__ import annotations

from livescale.control.cluster.departures import Departures
from livescale.messages.events import MembersLeave
from livescale.values.types import WorkerRef

W = [WorkerRef(number) for number in range(3)]
ON_HOSTS = [("a", W[0]), ("a", W[1]), ("b", W[2])]


def test_who_stays_is_not_told_of() -> None:
    assert Departures().look(ON_HOSTS, W) == ([], [])


def test_members_are_told_of_once_and_go_together() -> None:
    departures = Departures()
    assert departures.begin("a", 2)
    assert not departures.begin("a", 2)
    assert departures.look(ON_HOSTS, []) == ([MembersLeave((W[0], W[1]))], [])
    assert departures.look(ON_HOSTS, [W[0]]) == ([], [])
    assert departures.look(ON_HOSTS, [W[0], W[1]]) == ([], ["a"])
    assert departures.end("a")
    assert not departures.end("a")
    assert departures.look(ON_HOSTS, W) == ([], [])


def test_a_member_that_was_replaced_is_told_of_again() -> None:
    departures = Departures()
    departures.begin("b", 1)
    departures.look(ON_HOSTS, [])
    successor = WorkerRef(2, 1)
    found = departures.look([("b", successor)], [W[2]])
    assert found == ([MembersLeave((successor,))], [])


def test_no_host_goes_while_members_are_on_their_way() -> None:
    """After a restart of the controller the host's wire may be back before theirs."""
    departures = Departures()
    departures.begin("a", 2)
    assert departures.look([], []) == ([], [])
    assert departures.look([("a", W[0])], []) == ([MembersLeave((W[0],))], [])
    assert departures.look([("a", W[0])], [W[0]]) == ([], [])
