"""Cores of the hosts of a line's stages (QUART's CPU_max)."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.values.types import Value


class CoresOf(Value, frozen=True):
    """An instance that serves: the hosts of its workers, the cores that each of them has told, and
    the most that it can have."""

    cores: int
    most: int
    hosts: tuple[str, ...]


class StageCores(Value, frozen=True):
    """The instances of a stage that serve, first those that would stay. Workers began with `own`
    cores."""

    own: int
    instances: tuple[CoresOf, ...]

    @property
    def level(self) -> int:
        """What each instance has, or will have."""
        return max((its.cores for its in self.instances), default=self.own)

    @property
    def is_even(self) -> bool:
        """All instances have as many: one service time is that of each."""
        return len({its.cores for its in self.instances}) <= 1


class CoresSeen(Value, frozen=True):
    """A line's stages, and how many cores each host has left (fewer than 0: too many are used)."""

    stages: tuple[StageCores, ...]
    free: dict[str, int]


class CoreBudget:
    """What is left on each host while stages are gone through one after the other."""

    def __init__(self, free: dict[str, int]) -> None:
        self._free = dict(free)

    def most(self, stage: StageCores, keep: int) -> int:
        """The most that each of the first `keep` instances can have; at least what the stage
        has."""
        kept, level = stage.instances[:keep], stage.level
        ceiling = min((its.most for its in kept), default=level)
        while level < ceiling and self._fits(self._missing(kept, level + 1)):
            level += 1
        return level

    def take(self, stage: StageCores, keep: int, cores: int) -> None:
        """The first `keep` instances get so many each."""
        for host, count in self._missing(stage.instances[:keep], cores).items():
            self._free[host] = self._free.get(host, 0) - count

    def _fits(self, missing: dict[str, int]) -> bool:
        return all(count <= self._free.get(host, 0) for host, count in missing.items())

    @staticmethod
    def _missing(kept: Sequence[CoresOf], cores: int) -> dict[str, int]:
        """By host, what the instances lack of so many each."""
        missing: dict[str, int] = {}
        for its in kept:
            for host in its.hosts:
                missing[host] = missing.get(host, 0) + max(cores - its.cores, 0)
        return {host: count for host, count in missing.items() if count}
