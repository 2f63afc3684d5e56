"""What a gateway knows of the pool's models: which there are, where they stand, what they took.

Fed by the controller's messages; decides nothing and knows no requests (`transcripts.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from livescale.config.model import ModelConfig
from livescale.engine.files.checkpoint import ITEM_BYTES
from livescale.gateway.contract.backend import (
    AdministeredUsage,
    ModelCard,
    ModelPhase,
    ModelStatus,
    Reading,
)
from livescale.runtime.wire.protocol import (
    Catalog,
    CatalogEntry,
    ModelLoad,
    PoolStatus,
    PublishedModel,
    SpareStatus,
)
from livescale.values.scaling_policies import ROLES
from livescale.values.types import InstanceState, Role

_NOTHING = ModelLoad(0, 0)
_NO_SPARES = SpareStatus()
_STATES = tuple(
    state.value
    for state in InstanceState
    if state not in (InstanceState.STOPPED, InstanceState.LOST)
)
"""Of instances that are there; stopped and lost ones are forgotten."""


class ModelShelf:
    """The latest catalog and status. Before the first: the catalog that the gateway begins with."""

    def __init__(self, catalog: Catalog, directory_of: Callable[[CatalogEntry], Path]) -> None:
        """`directory_of` says where a model's tokenizer is here."""
        self._directory_of = directory_of
        #: as the controller last sent; None: nothing came yet
        self.status: PoolStatus | None = None
        self._cards: dict[str, tuple[CatalogEntry, ModelCard]] = {}
        self.take(catalog)

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """The models that take new requests."""
        return tuple(card for _, card in self._cards.values())

    @property
    def is_ready(self) -> bool:
        """Every model has what it should have at least."""
        return self.status is not None and not self.status.unready

    def take(self, catalog: Catalog) -> None:
        """From now on these are the models. A model that is as it was keeps its card."""
        known, self._cards = self._cards, {}
        for model in catalog.models:
            stage = model.entry.spec.stage
            # Clients know the model, not its stages.
            if not model.is_leaving and (stage is None or stage.is_first):
                before = known.get(model.entry.spec.offered_as)
                is_same = before is not None and before[0] == model.entry
                card = before[1] if before is not None and is_same else self._card(model.entry)
                self._cards[card.name] = (model.entry, card)
        self._catalog = catalog

    def states(self) -> tuple[ModelStatus, ...]:
        """All models, by name."""
        states = self._whole()
        states += [
            ModelStatus(name, directory, ModelPhase.PREPARING)
            for name, directory in self._catalog.preparing
        ]
        states += [
            ModelStatus(
                name=kept.settings.name,
                path=kept.settings.path,
                state=ModelPhase.FAILED,
                survives_restart=True,
                problem=kept.problem,
                **_as_given(kept.settings),
            )
            for kept in self._catalog.unserved
        ]
        return tuple(sorted(states, key=lambda state: state.name))

    def readings(self) -> list[Reading]:
        """Current amounts of the pool and of every model that is in it, for /metrics."""
        status = self.status or PoolStatus({}, 0, {})
        readings = [
            Reading("workers", status.workers),
            Reading("workers_wanted", status.workers_wanted),
            Reading("agents", status.agents),
        ]
        if status.is_recording is not None:
            readings.append(Reading("record_open", status.is_recording))
        for state in sorted(map(self._state, self._catalog.models), key=lambda one: one.name):
            readings += _readings_of(state, status)
        stages = [
            one.entry.spec for one in self._catalog.models if one.entry.spec.stage is not None
        ]
        for name in sorted(spec.name for spec in stages):
            readings += _stage_readings(name, status.loads.get(name, _NOTHING))
        return readings

    def __repr__(self) -> str:
        return f"<ModelShelf {', '.join(self._cards) or 'empty'}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _card(self, entry: CatalogEntry) -> ModelCard:
        return ModelCard(
            name=entry.spec.offered_as,
            model_tokens_max=entry.request_tokens_max,
            created_s=int(time.time()),
            eos_token_ids=entry.eos_token_ids,
            directory=self._directory_of(entry),
            sampling_defaults=entry.sampling_defaults,
            embedding_size=_embedding_size(entry),
        )

    def _whole(self) -> list[ModelStatus]:
        """Of each model, whose stages are one."""
        of_model: dict[str, list[ModelStatus]] = {}
        for model in self._catalog.models:
            of_model.setdefault(model.entry.spec.offered_as, []).append(self._state(model))
        decisions = self.status.decisions if self.status is not None else {}
        return [
            parts[0] if name == parts[0].name else _joined(name, parts, decisions)
            for name, parts in of_model.items()
        ]

    def _state(self, model: PublishedModel) -> ModelStatus:
        status = self.status or PoolStatus({}, 0, {})
        entry, policy, name = model.entry, model.policy, model.entry.spec.name
        device_ns = status.loads.get(name, _NOTHING).device_ns
        return ModelStatus(
            name=name,
            path=entry.directory,
            state=_phase(model, status),
            instances=status.instances.get(name, {}),
            instances_by_role=status.by_role.get(name, {}) if policy.roles else {},
            host_copies=status.copies.get(name, 0),
            warm_spares=status.spares.get(name, _NO_SPARES).copies,
            usage=AdministeredUsage(device_seconds=device_ns / 1e9),
            min_replicas=policy.instances_min,
            max_replicas=policy.instances_max,
            priority=policy.priority,
            problem=status.problems.get(name),
            survives_restart=model.survives_restart,
            warnings=entry.warnings,
            **_as_given(model.settings),
        )


_PHASES = (
    *(ModelPhase.LEAVING, ModelPhase.STARTING, ModelPhase.COPYING),
    *(ModelPhase.AT_ZERO, ModelPhase.SERVING),
)
"""A model is in the first one of these that one of its stages is in."""


def _joined(name: str, stages: Sequence[ModelStatus], decisions: Mapping[str, str]) -> ModelStatus:
    """A model with these stages."""
    instances: Counter[str] = Counter()
    for stage in stages:
        instances.update(stage.instances)
    problems = [stage.problem for stage in stages if stage.problem is not None]
    device_seconds = sum(stage.usage.device_seconds for stage in stages)
    return msgspec.structs.replace(
        stages[0],
        name=name,
        state=min((stage.state for stage in stages), key=_PHASES.index),
        instances=instances,
        instances_by_stage=[stage.instances for stage in stages],
        decisions_by_stage=[decisions.get(stage.name, "") for stage in stages],
        host_copies=min(stage.host_copies for stage in stages),
        warm_spares=sum(stage.warm_spares for stage in stages),
        usage=AdministeredUsage(device_seconds=device_seconds),
        problem=problems[0] if problems else None,
    )


def _embedding_size(entry: CatalogEntry) -> int:
    return entry.spec.row_bytes_per_token // ITEM_BYTES[entry.manifest.dtype]


def _as_given(model: ModelConfig) -> dict[str, Any]:
    return {
        name: getattr(model, name)
        for name in ("idle_s", "target_ongoing_requests", "schedule", "roles", "max_model_tokens")
    }


def _phase(model: PublishedModel, status: PoolStatus) -> ModelPhase:
    name = model.entry.spec.name
    if model.is_leaving:
        return ModelPhase.LEAVING
    instances = status.instances.get(name, {})
    if instances.get(InstanceState.SERVING.value, 0):
        return ModelPhase.SERVING
    if instances or model.policy.instances_min:
        return ModelPhase.STARTING
    # A model that may be at zero is ready when a copy is there, or storage does for one.
    return ModelPhase.COPYING if name in status.unready else ModelPhase.AT_ZERO


def _readings_of(state: ModelStatus, status: PoolStatus) -> list[Reading]:
    label, load = (("model", state.name),), status.loads.get(state.name, _NOTHING)
    used = load.kv_blocks_used / load.kv_blocks if load.kv_blocks else 0.0
    spares = status.spares.get(state.name, _NO_SPARES)
    return [
        *_instance_readings(state, status),
        Reading("host_copies", state.host_copies, label),
        Reading("warm_spares", state.warm_spares, label),
        Reading("warm_spare_bytes", spares.bytes, label),
        Reading("instance_starts_total", spares.starts, label),
        Reading("warm_starts_total", spares.warm_starts, label),
        Reading("device_seconds_total", state.usage.device_seconds, label),
        Reading("kv_cache_usage_perc", used, label),
        Reading("kv_blocks", load.kv_blocks, label),
        Reading("num_preemptions_total", load.preemptions, label),
        Reading("prefix_cache_queries_total", load.prefix_lookup_tokens, label),
        Reading("prefix_cache_hits_total", load.reused_tokens, label),
        Reading("handovers_total", load.handovers, label),
        Reading("handover_bytes_total", load.handover_bytes, label),
        Reading("model_problem", float(state.name in status.problems), label),
        Reading("failed_loads_total", status.failed_loads.get(state.name, 0), label),
    ]


def _stage_readings(name: str, load: ModelLoad) -> list[Reading]:
    """Their rates are arrivals and Runs per second, busy replicas and Runs in line."""
    label = (("model", name),)
    squared = load.gaps_squared_ns_s / 1e9
    return [
        Reading("stage_arrivals_total", load.came, label),
        Reading("stage_gap_seconds_total", load.gaps_ns / 1e9, label),
        Reading("stage_gap_seconds_squared_total", squared, label),
        Reading("stage_runs_total", load.visits, label),
        Reading("stage_runs_merged_total", load.merged, label),
        Reading("stage_busy_seconds_total", load.busy_ns / 1e9, label),
        Reading("stage_wait_seconds_total", load.waited_ns / 1e9, label),
    ]


def _instance_readings(state: ModelStatus, status: PoolStatus) -> list[Reading]:
    """All roles that the model has in all states, always: a series that comes and goes breaks sums
    and alerts."""
    roles = (Role.UNIFIED,) if state.roles is None else ROLES
    counts: Mapping[str, Mapping[str, int]] = status.by_role.get(state.name, {})
    return [
        Reading(
            "instances",
            counts.get(role, {}).get(at, 0),
            (("model", state.name), ("role", role), ("state", at)),
        )
        for role in dict.fromkeys((*roles, *counts))
        for at in _STATES
    ]
