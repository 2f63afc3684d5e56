"""Hosts that want to leave: when their members are told to the controller, and when they may go."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from livescale.messages.events import MembersLeave
from livescale.values.types import WorkerRef


class Departures:
    """Of one life of the controller, by the hosts' names."""

    def __init__(self) -> None:
        #: how many members each has, and those that the controller was told of
        self._members: dict[str, int] = {}
        self._told: dict[str, dict[WorkerRef, None]] = {}

    def begin(self, host: str, members: int) -> bool:
        """The host wants to leave, with so many members. False if that is known."""
        if host in self._told:
            return False
        self._members[host] = members
        self._told[host] = {}
        return True

    def end(self, host: str) -> bool:
        """The host is gone. False if it did not want to leave."""
        return self._told.pop(host, None) is not None

    def look(
        self,
        members: Iterable[tuple[str, WorkerRef]],
        free: Collection[WorkerRef],
    ) -> tuple[list[MembersLeave], list[str]]:
        """To be asked after every step: what the controller is told next, and which hosts may go.

        `members` are those that are there, with their hosts, and of those that leave `free` ones
        may go. A host goes when all its members are there: after a restart of the controller they
        are still on their way, with what they hold.
        """
        if not self._told:
            return [], []
        there: dict[str, list[WorkerRef]] = {host: [] for host in self._told}
        for host, ref in members:
            if host in there:
                there[host].append(ref)
        telling, going = [], []
        for host, refs in there.items():
            told = self._told[host]
            new = tuple(ref for ref in refs if ref not in told)
            if new:
                told |= dict.fromkeys(new)
                telling.append(MembersLeave(new))
            elif len(refs) >= self._members[host] and all(ref in free for ref in refs):
                going.append(host)
        return telling, going

    def __repr__(self) -> str:
        return f"<Departures {', '.join(self._told) or 'none'}>"
