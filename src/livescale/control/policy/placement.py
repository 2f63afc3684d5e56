"""Placement strategies: which host copies should be made or given up. They only suggest.

Pure functions from a view of copies and room to suggestions; `host_copies` turns these into
orders, and the ParameterPool has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from livescale.values.copy_strategies import (
    AllCopies,
    CacheCopies,
    KeyStageCopies,
    NoCopies,
    Placement,
)
from livescale.values.types import WorkerRef


@dataclass(frozen=True, slots=True)
class ModelCopies:
    """One model as a placement strategy sees it.

    `agents` hold a copy in their host's memory, complete or arriving. `needs_copy`: its last
    device copy is about to go. With `has_copy` others can be made of one, else only of its files.
    `is_leaving`: the model was withdrawn and is not needed.
    `used_ns` is when each copy was last read from. A key stage has its `key_reason`, and the agents
    of the hosts that its instances are on, with when each was `given_ns` the last one.
    """

    model: str
    size_bytes: int
    is_on_devices: bool
    needs_copy: bool
    is_leaving: bool
    agents: tuple[WorkerRef, ...]
    used_ns: dict[WorkerRef, int] = field(default_factory=dict)
    has_copy: bool = False
    key_reason: str = ""
    given_ns: dict[WorkerRef, int] = field(default_factory=dict)


@dataclass(slots=True)
class HostRoom:
    """Memory of one host that copies do not take: now, and more when those that go are gone. Only
    one that `reads_files` can have the first copy of a model. `memory_bytes` is all there is."""

    agent: WorkerRef
    free_bytes: int
    leaving_bytes: int = 0
    reads_files: bool = True
    memory_bytes: int = 0


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
    if isinstance(strategy, KeyStageCopies):
        return [*gone, *_key_stages(strategy.memory_percent, staying, rooms)]
    return [*gone, *_spread(staying, rooms)]


def room_for(
    size_bytes: int, room: HostRoom, models: Sequence[ModelCopies]
) -> list[Discard] | None:
    """Least recently used copies whose end makes room for `size_bytes` (None: not enough)."""
    there = [m for m in models if room.agent in m.agents]
    there.sort(key=lambda m: (m.used_ns.get(room.agent, 0), m.model))
    return _cleared(size_bytes, room, there, "least recently used")


def _cleared(
    size_bytes: int, room: HostRoom, there: Sequence[ModelCopies], reason: str
) -> list[Discard] | None:
    """The first of these copies that have to go for so many bytes, beside what goes already (None:
    all of them are not enough)."""
    discards: list[Discard] = []
    free = room.free_bytes + room.leaving_bytes
    for model in there:
        if free >= size_bytes:
            break
        discards.append(Discard(model.model, room.agent, reason))
        free += model.size_bytes
    return discards if free >= size_bytes else None


# -- the strategies -------------------------------------------------------------------------------


def _spread(models: Sequence[ModelCopies], rooms: Sequence[HostRoom]) -> list[Keep | Discard]:
    """One copy of every model, each where most memory is free (BlitzScale §5.3)."""
    extras = [(model.model, extra) for model in models for extra in model.agents[1:]]
    suggestions = [Discard(name, extra, "one copy is enough") for name, extra in extras]
    return [*suggestions, *_first_copies(models, rooms)]


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
        discards = _cleared(wanting.size_bytes, room, there, f"reclaimed for {wanting.model}")
        if discards is not None and (best is None or len(discards) < len(best)):
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


def _key_stages(
    percent: int, models: Sequence[ModelCopies], rooms: Sequence[HostRoom]
) -> list[Keep | Discard]:
    """Last copies, wherever memory is; then on each host the key stages that it was given last, as
    far as all of its copies take so many percent of its memory (QUART §6.1)."""
    taken = dict.fromkeys((room.agent for room in rooms), 0)
    for model in models:
        agent = _last_at(model)
        if agent is not None:
            taken[agent] += model.size_bytes
    suggestions: list[Keep | Discard] = [*_restored(percent, models, rooms, taken)]
    for room in rooms:
        suggestions += _most_recent(percent, models, room, taken[room.agent])
    return suggestions


def _last_at(model: ModelCopies) -> WorkerRef | None:
    """The host whose copy is the last one of the cluster's memory, or is about to be."""
    is_last = model.needs_copy or not model.is_on_devices
    return model.agents[0] if is_last and model.agents else None


def _restored(
    percent: int,
    models: Sequence[ModelCopies],
    rooms: Sequence[HostRoom],
    taken: dict[WorkerRef, int],
) -> list[Keep]:
    """Copies of models whose last one is about to go. All of a host's memory is for these: `taken`
    is what last copies have of it, and grows by those that wait for room, too."""
    lacking = [m for m in models if not m.agents]
    lacking = [m for m in lacking if m.needs_copy or (m.has_copy and not m.is_on_devices)]
    keeps: list[Keep] = []
    for model in sorted(lacking, key=lambda m: (-m.size_bytes, m.model)):
        size = model.size_bytes
        able = [r for r in _able(model, rooms) if taken[r.agent] + size <= r.memory_bytes]
        now = [room for room in able if room.free_bytes >= size]
        # Best where nothing has to go; then where its instances are: bytes cross no network.
        ranked = [
            (
                room.free_bytes - size < room.memory_bytes * (100 - percent) // 100,
                room.agent not in model.given_ns,
                -room.free_bytes,
                room.agent,
                room,
            )
            for room in now or able
        ]
        for *_, room in sorted(ranked, key=lambda entry: entry[:4])[:1]:
            taken[room.agent] += size
            if now:
                room.free_bytes -= size
                reason = "restored before the last device copy goes"
                keeps.append(Keep(model.model, room.agent, reason))
    return keeps


def _most_recent(
    percent: int, models: Sequence[ModelCopies], room: HostRoom, taken_bytes: int
) -> list[Keep | Discard]:
    """What else the host keeps: of the copies it has, and of the key stages it was given, those
    that were used last. A copy gives way only to what was used later, so that no two drive each
    other out for ever. `taken_bytes` are those of last copies."""
    agent, limit_bytes = room.agent, room.memory_bytes * percent // 100
    found: list[tuple[int, bool, ModelCopies]] = []
    for model in models:
        if agent in model.agents and agent != _last_at(model):
            found.append((-model.used_ns[agent], False, model))
        elif agent not in model.agents and model.key_reason and agent in model.given_ns:
            found.append((-model.given_ns[agent], True, model))
    found.sort(key=lambda entry: (entry[0], entry[1], entry[2].model))
    suggestions: list[Keep | Discard] = []
    for _, is_new, model in found:
        fits = taken_bytes + model.size_bytes <= limit_bytes
        taken_bytes += model.size_bytes if fits else 0
        left_bytes = room.free_bytes - model.size_bytes
        if not is_new and not fits:
            suggestions.append(Discard(model.model, agent, "least recently used"))
        elif is_new and fits and left_bytes >= room.memory_bytes - limit_bytes:
            room.free_bytes = left_bytes
            suggestions.append(Keep(model.model, agent, f"key stage: {model.key_reason}"))
    return suggestions
