"""Which numbers the hosts have that joined the pool: names become numbers once, and keep them.

Workers and agents are told apart by numbers (`types.WorkerRef`). The pool's own hosts have the
first ones; each host that joins gets the next, for as many workers as it has. The numbers outlive
the controller, whose owner keeps the entries for its next life, and a head that starts anew learns
them from the hosts that come back.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from livescale.values.types import Value

LIVES_PER_START = 1_000_000
"""So many incarnations has a worker in one life of its host's supervisor, before those of the next
one."""


class HostNumbers(Value, frozen=True):
    """What a host's processes are called: workers from `first_worker` on, in the order of the
    host's devices, and its agent. Their incarnations count from `first_life` on."""

    first_worker: int
    agent: int
    first_life: int = 0


class HostEntry(Value, frozen=True):
    """A host that joined, with numbers for so many workers as it ever had. `clock_ns` is when its
    supervisor began, by that machine's clock: of two supervisors of one name the later one counts.
    `is_here`: it has not left."""

    name: str
    places: int
    numbers: HostNumbers
    clock_ns: int
    is_here: bool = True


class HostRefusedError(Exception):
    """The host does not join; the message says why. With `may_pass` it may try again."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class HostLedger:
    """`taken` are the names of the pool's own hosts, which have `workers` workers."""

    def __init__(
        self, taken: Iterable[str], workers: int, entries: Iterable[HostEntry] = ()
    ) -> None:
        self._taken = tuple(taken)
        self._workers_from = workers
        self._entries = {entry.name: entry for entry in entries}

    @property
    def entries(self) -> tuple[HostEntry, ...]:
        """All hosts that ever joined, by name."""
        return tuple(entry for _, entry in sorted(self._entries.items()))

    def admit(
        self, name: str, workers: int, clock_ns: int, claimed: HostNumbers | None = None
    ) -> HostNumbers:
        """The numbers of a host whose supervisor began at `clock_ns`. A host that had numbers
        before has `claimed` them. Raises HostRefusedError."""
        if name in self._taken:
            raise HostRefusedError(f"a node named {name} is in the pool: choose another --name")
        known = self._entries.get(name)
        if known is not None and clock_ns < known.clock_ns:
            raise HostRefusedError(f"a later start of host {name} has joined")
        if known is None:
            numbers = claimed if claimed is not None and self._is_free(claimed, workers) else None
            numbers = numbers or self._fresh(0)
        elif known.clock_ns == clock_ns and workers <= known.places:
            numbers = known.numbers
        else:
            numbers = self._again(known, workers)
        is_same = known is not None and known.numbers.first_worker == numbers.first_worker
        places = max(workers, known.places) if known is not None and is_same else workers
        self._entries[name] = HostEntry(name, places, numbers, clock_ns)
        return numbers

    def leave(self, name: str) -> None:
        """The host is not expected back. Its numbers stay its own, but for hosts without workers,
        which come and go under ever new names: of these the last one is remembered, so that its
        number is not given again."""
        self._entries[name] = msgspec.structs.replace(self._entries[name], is_here=False)
        last = max(entry.numbers.agent for entry in self._entries.values())
        self._entries = {
            known: entry
            for known, entry in self._entries.items()
            if entry.is_here or entry.places or entry.numbers.agent == last
        }

    # -- helpers --------------------------------------------------------------------------------

    def _again(self, known: HostEntry, workers: int) -> HostNumbers:
        """The next start of a host: other incarnations, of the same numbers where they suffice."""
        life = known.numbers.first_life + LIVES_PER_START
        if workers > known.places:
            return self._fresh(life)
        return msgspec.structs.replace(known.numbers, first_life=life)

    def _fresh(self, life: int) -> HostNumbers:
        """Behind all others: a number is never another host's again."""
        entries = self._entries.values()
        ends = [e.numbers.first_worker + e.places for e in entries]
        agents = [e.numbers.agent + 1 for e in entries]
        return HostNumbers(max([self._workers_from, *ends]), max([len(self._taken), *agents]), life)

    def _is_free(self, claimed: HostNumbers, workers: int) -> bool:
        first, end = claimed.first_worker, claimed.first_worker + workers
        if first < self._workers_from or claimed.agent < len(self._taken):
            return False
        return all(
            claimed.agent != entry.numbers.agent
            and (
                end <= entry.numbers.first_worker
                or first >= entry.numbers.first_worker + entry.places
            )
            for entry in self._entries.values()
        )

    def __repr__(self) -> str:
        return f"<HostLedger {', '.join(self._entries) or 'empty'}>"
