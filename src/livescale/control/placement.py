"""Placement strategies: which host copies should be made or given up. They only suggest.

Pure functions from a view of copies and room to suggestions; `host_copies` turns these into
orders, and the ParameterPool has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from livescale.placements import AllCopies, CacheCopies, NoCopies, Placement
from livescale.types import WorkerRef


@dataclass(frozen=True, slots=True)
class ModelCopies:
    """One model as a placement strategy sees it.

    `agents` hold a copy in their host's memory, complete or arriving. `needs_copy`: its last
    device copy is about to go. With `has_copy` others can be made of one, else only of its files.
    `is_leaving`: the model was withdrawn and is not needed.
    `used_ns` is when each copy was last read from.
    """

    model: str
    size_bytes: int
    is_on_devices: bool
    needs_copy: bool
    is_leaving: bool
    agents: tuple[WorkerRef, ...]
    used_ns: dict[WorkerRef, int] = field(default_factory=dict)
    has_copy: bool = False


@dataclass(slots=True)
class HostRoom:
    """Memory of one host that copies do not take: now, and more when those that go are gone. Only
    one that `reads_files` can have the first copy of a model."""

    agent: WorkerRef
    free_bytes: int
    leaving_bytes: int = 0
    reads_files: bool = True


@dataclass(frozen=True, slots=True)
class Keep:
    """A copy should be made."""

    model: str
    agent: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """A copy should go."""

    model: str
    agent: WorkerRef
    reason: str


def suggest(
    strategy: Placement, now_ns: int, models: Sequence[ModelCopies], rooms: Sequence[HostRoom]
) -> list[Keep | Discard]:
    """What should change now. `rooms` is used up by what is suggested."""
    gone: list[Keep | Discard] = [
        Discard(m.model, agent, "withdrawn") for m in models if m.is_leaving for agent in m.agents
    ]
    staying = [m for m in models if not m.is_leaving]
    if isinstance(strategy, NoCopies):
        return gone
    if isinstance(strategy, AllCopies):
        return [*gone, *_everywhere(staying, rooms)]
    if isinstance(strategy, CacheCopies):
        return [*gone, *_outdated(strategy, now_ns, staying)]
    return [*gone, *_spread(staying, rooms)]


def room_for(
    size_bytes: int, room: HostRoom, models: Sequence[ModelCopies]
) -> list[Discard] | None:
    """Least recently used copies whose end makes room for `size_bytes` (None: not enough)."""
    there = [m for m in models if room.agent in m.agents]
    there.sort(key=lambda m: (m.used_ns.get(room.agent, 0), m.model))
    discards: list[Discard] = []
    free = room.free_bytes + room.leaving_bytes
    for model in there:
        if free >= size_bytes:
            break
        discards.append(Discard(model.model, room.agent, "least recently used"))
        free += model.size_bytes
    return discards if free >= size_bytes else None


# -- the strategies -------------------------------------------------------------------------------


def _spread(models: Sequence[ModelCopies], rooms: Sequence[HostRoom]) -> list[Keep | Discard]:
    """One copy of every model, each where most memory is free (BlitzScale §5.3)."""
    suggestions: list[Keep | Discard] = []
    for model in models:
        for extra in model.agents[1:]:
            suggestions.append(Discard(model.model, extra, "one copy is enough"))
    return suggestions + _first_copies(models, rooms)


def _first_copies(models: Sequence[ModelCopies], rooms: Sequence[HostRoom]) -> list[Keep | Discard]:
    """A copy of every model that has none on any host, each where most memory is free."""
    suggestions: list[Keep | Discard] = []
    lacking = [m for m in models if not m.agents]
    # Who has no other copy comes first; the largest finds room while there is some.
    lacking.sort(key=lambda m: (m.is_on_devices and not m.needs_copy, -m.size_bytes, m.model))
    for model in lacking:
        able = _able(model, rooms)
        room = min(able, key=lambda r: (-r.free_bytes, r.agent), default=None)
        if room is not None and room.free_bytes >= model.size_bytes:
            room.free_bytes -= model.size_bytes
            reason = "restored before the last device copy goes" if model.needs_copy else "spread"
            suggestions.append(Keep(model.model, room.agent, reason))
        elif not model.is_on_devices or model.needs_copy:
            suggestions += _reclaim(model, models, rooms)
    return suggestions


def _able(model: ModelCopies, rooms: Sequence[HostRoom]) -> list[HostRoom]:
    """Hosts to which a copy of the model can come."""
    return [room for room in rooms if model.has_copy or room.reads_files]


def _reclaim(
    wanting: ModelCopies, models: Sequence[ModelCopies], rooms: Sequence[HostRoom]
) -> list[Discard]:
    """Copies of models that devices hold too, on the one host where the fewest must go: none,
    where what is going already makes room."""
    best: list[Discard] | None = None
    for room in sorted(_able(wanting, rooms), key=lambda r: r.agent):
        there = [
            m for m in models if room.agent in m.agents and m.is_on_devices and not m.needs_copy
        ]
        there.sort(key=lambda m: (-m.size_bytes, m.model))
        free, discards = room.free_bytes + room.leaving_bytes, []
        for model in there:
            if free >= wanting.size_bytes:
                break
            reason = f"reclaimed for {wanting.model}"
            discards.append(Discard(model.model, room.agent, reason))
            free += model.size_bytes
        if free >= wanting.size_bytes and (best is None or len(discards) < len(best)):
            best = discards
    return best or []


def _everywhere(models: Sequence[ModelCopies], rooms: Sequence[HostRoom]) -> list[Keep | Discard]:
    """A copy of every model on every host. Where memory is short each model has one first, as
    when they are spread: else the last device copies of some could never go."""
    # What another host has, too, makes way as what a device has.
    views = [
        replace(m, is_on_devices=True, needs_copy=False) if len(m.agents) > 1 else m for m in models
    ]
    suggestions = _first_copies(views, rooms)
    first = {s.model: s.agent for s in suggestions if isinstance(s, Keep)}
    lacking = [m for m in models if not m.agents and m.model not in first]
    if any(m.needs_copy or not m.is_on_devices for m in lacking):
        return suggestions  # whatever comes free is theirs
    for model in models:
        there = (*model.agents, first.get(model.model))
        for room in rooms:
            if room.agent not in there and room.free_bytes >= model.size_bytes:
                room.free_bytes -= model.size_bytes
                suggestions.append(Keep(model.model, room.agent, "everything everywhere"))
    return suggestions


def _outdated(
    cache: CacheCopies, now_ns: int, models: Sequence[ModelCopies]
) -> list[Keep | Discard]:
    return [
        Discard(model.model, agent, "not used for its time to live")
        for model in models
        for agent in model.agents
        if now_ns >= model.used_ns.get(agent, 0) + cache.ttl_ns
    ]
