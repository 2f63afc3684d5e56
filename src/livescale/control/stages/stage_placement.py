"""On which hosts new replicas of stages go (QUART §6.2).

Key stages go where most devices are free, so that they can grow on from the copy in that host's
memory; the others are packed, beside key stages only where nothing else is free. Where hosts are
too few for each key stage to have one, key stages are spread by the KL descent. `place_spread` is
the plain comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from livescale.control.stages.formulas.spreading import descend
from livescale.values.types import Value


class StageHost(Value, frozen=True):
    """A host: its devices, how many of them are free, how many replicas of each stage it has
    (stages that it has none of may be left out), and of which stages its memory has `copies`."""

    host: int
    devices: int
    free: int
    replicas: dict[int, int] = msgspec.field(default_factory=dict)
    copies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.free <= self.devices:
            raise ValueError(f"host {self.host}: {self.free} of {self.devices} devices are free")


class StageNeed(Value, frozen=True):
    """So many new replicas of a stage, one device each. Key stages are named even with none."""

    stage: int
    count: int
    is_key: bool = False


class StagePlaced(Value, frozen=True):
    """A new replica of `stage` on `host`, because of `reason`: `key_most_free`, `key_kl` or
    `dense`, or of the comparison `spread`."""

    stage: int
    host: int
    reason: str


def place(hosts: Sequence[StageHost], needs: Sequence[StageNeed]) -> list[StagePlaced]:
    """A host for each new replica, key stages first, in the order of stages; fewer where devices
    are too few. Of equal hosts the one with the lowest number is taken.

    Key stages by the KL descent where they are contended (`is_contended`).
    """
    floor = _Floor(hosts)
    keys = sorted((need for need in needs if need.is_key), key=lambda need: need.stage)
    others = sorted((need for need in needs if not need.is_key), key=lambda need: need.stage)
    contended = is_contended(hosts, needs)
    for need in keys:
        if contended:
            floor.put_by_shares(need, floor.kl_shares(need.stage))
        else:
            floor.put(need, "key_most_free", _most_free)
    key_stages = [need.stage for need in keys]
    for need in others:
        # The fullest host would often be one where a key stage has just come, which is to grow.
        floor.put(
            need, "dense", lambda room, stage: (not any(map(room.of, key_stages)), -room.free)
        )
    return floor.placed


def place_spread(hosts: Sequence[StageHost], needs: Sequence[StageNeed]) -> list[StagePlaced]:
    """Every replica on the host with the most free devices, whatever its stage."""
    floor = _Floor(hosts)
    for need in sorted(needs, key=lambda need: need.stage):
        floor.put(need, "spread", lambda room, stage: (room.free, 0))
    return floor.placed


def is_contended(hosts: Sequence[StageHost], needs: Sequence[StageNeed]) -> bool:
    """Whether fewer hosts are wholly free than key stages want replicas: "key stages cannot fully
    occupy an entire machine"."""
    wholly_free = sum(room.free == room.devices > 0 for room in hosts)
    return wholly_free < sum(need.is_key and need.count > 0 for need in needs)


def _most_free(room: _Room, stage: int) -> tuple[float, ...]:
    """A host with a copy in its memory, of these one with most free devices, then one with the
    fewest replicas of the stage."""
    return stage in room.copies, room.free, -room.of(stage)


class _Room:
    """A host while replicas are placed on it."""

    def __init__(self, room: StageHost) -> None:
        self.host, self.free, self.copies = room.host, room.free, room.copies
        self._replicas: dict[int, int] = dict(room.replicas)

    def of(self, stage: int) -> int:
        return self._replicas.get(stage, 0)

    def add(self, stage: int) -> None:
        self.free -= 1
        self._replicas[stage] = self.of(stage) + 1


class _Floor:
    """All hosts, and what has been placed."""

    def __init__(self, hosts: Sequence[StageHost]) -> None:
        self._rooms = [_Room(room) for room in sorted(hosts, key=lambda room: room.host)]
        self.placed: list[StagePlaced] = []

    def put(
        self, need: StageNeed, reason: str, merit: Callable[[_Room, int], tuple[float, ...]]
    ) -> None:
        """One replica after the other, each where the merit is largest."""
        for _ in range(need.count):
            rooms = [room for room in self._rooms if room.free > 0]
            if not rooms:
                return
            best = max(rooms, key=lambda room: (*merit(room, need.stage), -room.host))
            best.add(need.stage)
            self.placed.append(StagePlaced(need.stage, best.host, reason))

    def kl_shares(self, stage: int) -> dict[int, float]:
        """The descent's P of a stage over the hosts that have it or could get it, from where its
        replicas are to Q, the uniform distribution."""
        rooms = [room for room in self._rooms if room.free > 0 or room.of(stage)]
        if not rooms:
            return {}
        total = sum(room.of(stage) for room in rooms)
        # From nowhere every way is as long: the stage without replicas begins at Q.
        start = [room.of(stage) / total if total else 1 / len(rooms) for room in rooms]
        shares = descend(start, [1 / len(rooms)] * len(rooms))
        return {room.host: share for room, share in zip(rooms, shares, strict=True)}

    def put_by_shares(self, need: StageNeed, shares: Mapping[int, float]) -> None:
        """Whole replicas within free devices: each goes where most of the host's share of all
        replicas of the stage, old and new, is missing."""
        total = need.count + sum(room.of(need.stage) for room in self._rooms)

        def missing(room: _Room, stage: int) -> tuple[float, ...]:
            # Rounded: where shares are equal but for the descent's last digits, hosts are.
            lacks = round(total * shares.get(room.host, 0.0) - room.of(stage), 3)
            return stage in room.copies, lacks, room.free

        self.put(need, "key_kl", missing)
