"""The settings of one model of a pool; part of the one table of settings (`pool.py`)."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Annotated

import msgspec

from livescale.common.settings import About, ConfigError, read_values, settings_of
from livescale.values.types import LayerSpan, Role, Value


class RoleReplicas(Value, frozen=True, kw_only=True):
    """Limits on a model's instances with one role."""

    min_replicas: Annotated[int, About("instances with this role at least; 0: see `roles`")] = 1
    max_replicas: Annotated[
        int | None,
        About("instances at most; as many as there are workers for them if none", lower=1),
    ] = None


class RolesConfig(Value, frozen=True, kw_only=True):
    """Limits for both roles: there is none without the other."""

    prefill: Annotated[RoleReplicas, About("instances that compute prompts")]
    decode: Annotated[RoleReplicas, About("instances that generate all tokens but the first")]

    @property
    def both(self) -> tuple[tuple[Role, RoleReplicas], ...]:
        """In the order of `scaling_policies.ROLES`."""
        return (Role.PREFILL, self.prefill), (Role.DECODE, self.decode)


class ModelConfig(Value, frozen=True, kw_only=True):
    """One entry of `models:`."""

    path: Annotated[str, About("directory of the model; relative to the file that names it")]
    name: Annotated[str, About("name in requests; the directory's name if empty")] = ""
    min_replicas: Annotated[
        int, About("instances at least; 0: the last one goes when no request comes (scale to zero)")
    ] = 1
    max_replicas: Annotated[
        int | None, About("instances at most; as many as there are workers if none", lower=1)
    ] = None
    prefill_tokens_per_s: Annotated[
        int | None, About("capacity of one instance; measured at warm-up if none", "tokens/s", 1)
    ] = None
    kv_blocks: Annotated[
        int | None, About("KV blocks of one instance; measured at warm-up if none", "blocks", 1)
    ] = None
    max_model_tokens: Annotated[
        int | None,
        About(
            "longest prompt and answer together, not above the model's own length; that length if"
            " none",
            "tokens",
            2,
        ),
    ] = None
    idle_s: Annotated[
        int, About("time without a request after which the last instance goes", "s", 0, 31_536_000)
    ] = 60
    priority: Annotated[
        int, About("models of higher priority get scarce devices first", "", -1000, 1000)
    ] = 0
    target_ongoing_requests: Annotated[
        int | None,
        About(
            "unfinished requests per instance to scale to; by scaling_policy if none", "requests", 1
        ),
    ] = None
    schedule: Annotated[
        str,
        About(
            "limits by time of day (UTC): '08:00-20:00 min=2 max=6', more after a semicolon;"
            " the first that holds replaces the limits above"
        ),
    ] = ""
    roles: Annotated[
        RolesConfig | None,
        About(
            "prompts and the tokens after them on instances of their own, with these limits instead"
            " of those above; 0 at least: of both, they go together; none: each instance does both"
        ),
    ] = None

    stages: Annotated[
        int | None,
        About(
            "parts of the model that are loaded, and have instances, by themselves, with even"
            " numbers of layers; limits are each part's; none: the model is one",
            lower=2,
        ),
    ] = None
    stage_profile: Annotated[
        str | None,
        About(
            "file of `bench profile` for this model: stages are even by the time that layers take;"
            " none: by their number"
        ),
    ] = None
    stage_spans: Annotated[
        str,
        About("layers of each stage, as '0-5 5-10 10-18' (the last one is excluded), not even"),
    ] = ""
    max_stage_replicas: Annotated[
        int | None,
        About("instances of all stages together at most; none: one for each worker", lower=1),
    ] = None

    @property
    def has_stages(self) -> bool:
        return self.stages is not None or bool(self.stage_spans)

    @property
    def stage_count(self) -> int:
        """One for a model without stages."""
        if not self.has_stages:
            return 1
        return self.stages or len(self.stage_spans.split())

    @property
    def instances_min(self) -> int:
        """Of all roles, or of all stages, together."""
        if self.has_stages:
            return self.min_replicas * self.stage_count
        if self.roles is None:
            return self.min_replicas
        return sum(limits.min_replicas for _, limits in self.roles.both)


MODEL_SETTINGS = settings_of(ModelConfig)
CHANGEABLE_SETTINGS = tuple(
    setting
    for setting in MODEL_SETTINGS
    if setting.name
    in (
        *("min_replicas", "max_replicas", "idle_s", "priority"),
        *("target_ongoing_requests", "schedule", "roles"),
    )
)
"""Those of a model that can be changed while it runs."""


def read_roles(value: object, where: str) -> RolesConfig | None:
    """The setting `roles` wherever a file has it. Raises ConfigError."""
    setting = next(setting for setting in MODEL_SETTINGS if setting.name == "roles")
    values = read_values({setting.name: value}, (setting,), where)
    roles = msgspec.convert(values[setting.name], RolesConfig | None)
    if roles is not None:
        check_roles(roles, None, where)
    return roles


def check_limits(least: int, most: int | None, workers: int | None, where: str) -> None:
    """Limits hold for a pool of so many workers (None: of any number). Raises ConfigError."""
    largest = workers if most is None else most
    if largest is None:
        return
    if workers is not None and largest > workers:
        raise ConfigError(f"{where}max_replicas is {largest}, above workers {workers}")
    if least > largest:
        limit = "workers" if most is None else "max_replicas"
        raise ConfigError(f"{where}min_replicas is {least}, above {limit} {largest}")


def check_roles(roles: RolesConfig, workers: int | None, where: str) -> None:
    """Both roles find workers, and go to zero together. Raises ConfigError."""
    for role, limits in roles.both:
        least, most = limits.min_replicas, limits.max_replicas
        check_limits(least, most, workers, f"{where}roles: {role}: ")
    prefill, decode = roles.prefill.min_replicas, roles.decode.min_replicas
    if bool(prefill) != bool(decode):
        raise ConfigError(
            f"{where}roles: min_replicas is {prefill} for prefill and {decode} for decode: both are"
            " 0, or neither"
        )
    if workers is not None and max(prefill + decode, 2) > workers:
        raise ConfigError(
            f"{where}roles: prefill and decode need {max(prefill + decode, 2)} instances at least,"
            f" above workers {workers}"
        )


def check_stages_given(model: ModelConfig, workers: int | None, where: str) -> None:
    """Stages are given in one way, and go with what else is given. Raises ConfigError."""
    if not model.has_stages:
        for name in ("max_stage_replicas", "stage_profile"):
            if getattr(model, name) is not None:
                raise ConfigError(f"{where}{name} is given, and no stages")
        return
    if model.stages is not None and model.stage_spans:
        raise ConfigError(f"{where}stages and stage_spans are given: one of them is enough")
    if model.stage_profile is not None and model.stages is None:
        raise ConfigError(f"{where}stage_profile is given, and the spans are: it decides nothing")
    if model.roles is not None:
        raise ConfigError(f"{where}stages and roles do not go together")
    if model.min_replicas < 1:
        raise ConfigError(f"{where}min_replicas is 0: each stage needs an instance at least")
    count = model.stages if model.stages is not None else len(stage_spans(model, where))
    if workers is not None and count * model.min_replicas > workers:
        raise ConfigError(
            f"{where}{count} stages need {count * model.min_replicas} instances at least,"
            f" above workers {workers}"
        )
    total = model.max_stage_replicas
    if total is not None and count * model.min_replicas > total:
        raise ConfigError(
            f"{where}{count} stages need {count * model.min_replicas} instances at least,"
            f" above max_stage_replicas {total}"
        )


def leaders_max(model: ModelConfig, workers: int) -> int:
    """Instances of the first stage, at most, in a pool of so many workers: as many leaders may
    share the KV of one instance of a later stage, if others of that stage are lost."""
    if not model.has_stages:
        return 1
    total = model.max_stage_replicas or workers
    left = total - (model.stage_count - 1) * model.min_replicas
    return max(min(left, model.max_replicas or left), 1)


def stage_spans(model: ModelConfig, where: str) -> tuple[LayerSpan, ...]:
    """Those of `stage_spans`, as they are written. Raises ConfigError."""
    spans = []
    for text in model.stage_spans.split():
        found = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise ConfigError(f"{where}stage_spans: '{text}' is not FIRST-LAST, as 0-5")
        spans.append(LayerSpan(int(found[1]), int(found[2])))
    return tuple(spans)


def check_limits_given(roles: RolesConfig | None, given: Container[str], where: str) -> None:
    """With roles there are no other limits, not even those that would be the defaults. Raises
    ConfigError."""
    for name in ("min_replicas", "max_replicas"):
        if roles is not None and name in given:
            raise ConfigError(f"{where}: {name} is given, and roles, which have their own limits")
