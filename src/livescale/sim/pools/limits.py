"""How many instances each model of a simulated pool may have, of each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from livescale.common.errors import UserError
from livescale.config.slo import SloAbsolute
from livescale.sim.pools.systems import System
from livescale.values.scaling_policies import ROLES, RoleLimits
from livescale.values.types import Role, Value


class PoolError(UserError, ValueError):
    """A cluster cannot run these models; the message names what is too large or not known."""


class PooledRoles(Value, frozen=True):
    """InstanceLimits of a model's prefill and decode instances, where the two are kept apart.

    A most of None: as many as the pool has room for besides the least of the other role. A pool
    whose size is fixed is divided as `split` says (prefill, decode), one instance each at least.
    """

    prefill_min: int = 1
    prefill_max: int | None = None
    decode_min: int = 1
    decode_max: int | None = None
    split: tuple[int, int] = (1, 1)


class PooledModel(Value, frozen=True):
    """A model that a pool serves: its name there, the preset that it is, ranks and limits.

    `instances_max` None: as many as the pool has room for. With `roles` each instance prefills or
    decodes, and the limits of `roles` hold in place of the model's. The pool knows `slo`, if there
    is one: its systems with an aim scale to it, and its instances take turns by it.
    """

    name: str
    preset: str
    tp_size: int = 1
    instances_min: int = 1
    instances_max: int | None = None
    idle_ns: int = 60_000_000_000
    priority: int = 0
    roles: PooledRoles | None = None
    slo: SloAbsolute | None = None


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """Least and most instances of one model, and of its roles where it has some."""

    least: int
    most: int
    roles: tuple[RoleLimits, ...] = ()

    @classmethod
    def of_roles(cls, prefill: tuple[int, int], decode: tuple[int, int]) -> InstanceLimits:
        """Least and most of each role. Raises ValueError for some that cannot be."""
        pairs = zip(ROLES, (prefill, decode), strict=True)
        roles = tuple(RoleLimits(role, *limits) for role, limits in pairs)
        return cls(prefill[0] + decode[0], prefill[1] + decode[1], roles)


def limits_of(
    devices: int,
    models: Sequence[PooledModel],
    fitting: Sequence[int],
    system: System,
    weights: Mapping[str, int] | None,
) -> list[InstanceLimits]:
    """Least and most instances of every model; the pool has so many `devices` and room for
    `fitting` instances of each alone.

    Where provisioning is fixed, devices are dealt among the models by `weights` (tokens asked of
    each; None: equally), one instance each at least. Raises PoolError.
    """
    if not system.is_fixed:
        return [_scaled(model, room) for model, room in zip(models, fitting, strict=True)]
    if system.fixed_like is not None:
        raise PoolError(f"{system.name} has no size before {system.fixed_like} has run")
    if system.fixed_roles is not None:
        found = [_of_roles(model, *system.fixed_roles) for model in models]
    elif system.fixed_instances is not None:
        found = [_fixed(model, system.fixed_instances) for model in models]
    else:
        size = devices * (system.fixed_percent or 0) // 100
        if system.fixed_devices is not None:
            size = system.fixed_devices
        counts = _dealt(size, models, fitting, weights)
        found = [_fixed(model, count) for model, count in zip(models, counts, strict=True)]
    needed = sum(limits.most * model.tp_size for limits, model in zip(found, models, strict=True))
    if needed > devices or any(
        limits.most > room for limits, room in zip(found, fitting, strict=True)
    ):
        raise PoolError(
            f"{system.name} needs {needed} devices for {len(models)} models, and the cluster has"
            f" {devices}"
        )
    return found


# -- helpers, in the order used -------------------------------------------------------------------


def _scaled(model: PooledModel, room: int) -> InstanceLimits:
    roles = model.roles
    if roles is None:
        least, most = _between(model.name, "", (model.instances_min, model.instances_max), room)
        return InstanceLimits(least, most)
    name = model.name
    if roles.prefill_min + roles.decode_min > room:
        raise PoolError(
            f"{name}: {roles.prefill_min} prefill and {roles.decode_min} decode instances at"
            f" least, and the pool has room for {room}"
        )
    prefill = (roles.prefill_min, roles.prefill_max)
    decode = (roles.decode_min, roles.decode_max)
    return InstanceLimits.of_roles(
        _between(name, f"{Role.PREFILL} ", prefill, room - roles.decode_min),
        _between(name, f"{Role.DECODE} ", decode, room - roles.prefill_min),
    )


def _between(name: str, kind: str, asked: tuple[int, int | None], room: int) -> tuple[int, int]:
    """Least and most as far as there is room. Raises PoolError."""
    least, at_most = asked
    most = room if at_most is None else min(at_most, room)
    if not 0 <= least <= most or most < 1:
        raise PoolError(
            f"{name}: {least} {kind}instances at least, and at most {most}"
            f" (the pool has room for {room})"
        )
    return least, most


def _of_roles(model: PooledModel, prefill: int, decode: int) -> InstanceLimits:
    """So many of each role; of a model without roles as many in sum."""
    if model.roles is None:
        return InstanceLimits(prefill + decode, prefill + decode)
    return InstanceLimits.of_roles((prefill, prefill), (decode, decode))


def _fixed(model: PooledModel, count: int) -> InstanceLimits:
    """So many all the time. Raises PoolError."""
    if model.roles is None:
        return InstanceLimits(count, count)
    if count < len(ROLES):
        raise PoolError(f"{model.name}: {count} instance is none for each role")
    first, second = model.roles.split
    prefill = min(max((2 * count * first + first + second) // (2 * (first + second)), 1), count - 1)
    return _of_roles(model, prefill, count - prefill)


def _dealt(
    devices: int,
    models: Sequence[PooledModel],
    fitting: Sequence[int],
    weights: Mapping[str, int] | None,
) -> list[int]:
    """Instances by model: one each, then to the model with most weight per device (D'Hondt)."""
    asked = [weights.get(m.name, 0) if weights is not None else 1 for m in models]
    counts = [1 if model.roles is None else len(ROLES) for model in models]
    left = devices - sum(n * model.tp_size for n, model in zip(counts, models, strict=True))
    while True:
        able = [
            i for i, model in enumerate(models) if model.tp_size <= left and counts[i] < fitting[i]
        ]
        if not able:
            return counts
        chosen = max(able, key=lambda i: (asked[i] / models[i].tp_size / (counts[i] + 1), -i))
        counts[chosen] += 1
        left -= models[chosen].tp_size
