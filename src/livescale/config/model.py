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

    min_replicas: Annotated[
        int,
        About("Smallest number of instances with this role. 0 applies to both roles or to none."),
    ] = 1
    max_replicas: Annotated[
        int | None,
        About(
            "Largest number of instances with this role. With none, the number of workers is the"
            " limit.",
            lower=1,
        ),
    ] = None


class RolesConfig(Value, frozen=True, kw_only=True):
    """Limits for both roles: there is none without the other."""

    prefill: Annotated[RoleReplicas, About("Limits on instances that compute prompts.")]
    decode: Annotated[
        RoleReplicas, About("Limits on instances that generate the tokens after the first.")
    ]

    @property
    def both(self) -> tuple[tuple[Role, RoleReplicas], ...]:
        """In the order of `scaling_policies.ROLES`."""
        return (Role.PREFILL, self.prefill), (Role.DECODE, self.decode)


class ModelConfig(Value, frozen=True, kw_only=True):
    """One entry of `models:`."""

    path: Annotated[
        str, About("Folder of the model. The path is relative to the file that has this key.")
    ]
    name: Annotated[
        str, About("Model name in requests. If empty, the name is that of the model's folder.")
    ] = ""
    min_replicas: Annotated[
        int,
        About(
            "Smallest number of instances. With 0, the model scales to zero after `idle_s` without"
            " a request."
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        About(
            "Largest number of instances. With none, the number of workers is the limit.", lower=1
        ),
    ] = None
    prefill_tokens_per_s: Annotated[
        int | None,
        About(
            "Prefill capacity of an instance. With none, the worker measures the capacity at"
            " warm-up.",
            "tokens/s",
            1,
        ),
    ] = None
    kv_blocks: Annotated[
        int | None,
        About(
            "KV blocks of an instance. With none, the worker measures the number at warm-up.",
            "blocks",
            1,
        ),
    ] = None
    max_model_tokens: Annotated[
        int | None,
        About(
            "Longest request, prompt and answer together. The value may not exceed the model's own"
            " limit. With none, the model's own limit applies.",
            "tokens",
            2,
        ),
    ] = None
    idle_s: Annotated[
        int,
        About(
            "Idle time before the last instance is drained. `min_replicas: 0` enables it.",
            "s",
            0,
            31_536_000,
        ),
    ] = 60
    priority: Annotated[
        int,
        About(
            "Priority for scarce devices. Models of higher priority get devices first.",
            "",
            -1000,
            1000,
        ),
    ] = 0
    target_ongoing_requests: Annotated[
        int | None,
        About(
            "Target number of unfinished requests per instance. With none, the model scales by"
            " `scaling_policy`.",
            "requests",
            1,
        ),
    ] = None
    schedule: Annotated[
        str,
        About(
            "Limits by time of day (UTC), for example '08:00-20:00 min=2 max=6'. Semicolons"
            " separate periods. The first period that applies replaces `min_replicas` and"
            " `max_replicas`."
        ),
    ] = ""
    roles: Annotated[
        RolesConfig | None,
        About(
            "Separate instances for prefill and decode, each with limits of their own. These limits"
            " replace `min_replicas` and `max_replicas`. With none, each instance does both."
        ),
    ] = None

    stages: Annotated[
        int | None,
        About(
            "Number of stages of the model. A stage is a run of layers that has instances of its"
            " own. Stages have equal numbers of layers. `min_replicas` and `max_replicas` apply to"
            " each stage. With none, the model is not split.",
            lower=2,
        ),
    ] = None
    stage_profile: Annotated[
        str | None,
        About(
            "File of `livescale bench profile` for this model. With a file, stages take equal times"
            " instead of equal numbers of layers."
        ),
    ] = None
    stage_spans: Annotated[
        str,
        About(
            "Layers of each stage, for example '0-5 5-10 10-18'. A stage excludes its last number."
            " The key replaces `stages`."
        ),
    ] = ""
    max_stage_replicas: Annotated[
        int | None,
        About(
            "Largest number of instances of all stages together. With none, the number of workers"
            " is the limit.",
            lower=1,
        ),
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
            f"{where}roles: min_replicas is {prefill} for prefill and {decode} for decode."
            " Set both to 0, or neither"
        )
    if workers is not None and max(prefill + decode, 2) > workers:
        raise ConfigError(
            f"{where}roles: prefill and decode need at least {max(prefill + decode, 2)} instances,"
            f" above workers {workers}"
        )


def check_stages_given(model: ModelConfig, workers: int | None, where: str) -> None:
    """Stages are given in one way, and go with what else is given. Raises ConfigError."""
    if not model.has_stages:
        for name in ("max_stage_replicas", "stage_profile"):
            if getattr(model, name) is not None:
                raise ConfigError(f"{where}{name} requires stages. Set `stages`, or remove {name}")
        return
    if model.stages is not None and model.stage_spans:
        raise ConfigError(f"{where}stages and stage_spans are both set. Remove one of them")
    if model.stage_profile is not None and model.stages is None:
        raise ConfigError(
            f"{where}stage_profile has no effect with stage_spans. Remove one of them"
        )
    if model.roles is not None:
        raise ConfigError(f"{where}stages and roles are both set. Remove one of them")
    if model.min_replicas < 1:
        raise ConfigError(f"{where}min_replicas is 0. Each stage needs at least one instance")
    count = model.stages if model.stages is not None else len(stage_spans(model, where))
    if workers is not None and count * model.min_replicas > workers:
        raise ConfigError(
            f"{where}{count} stages need at least {count * model.min_replicas} instances,"
            f" above workers {workers}"
        )
    total = model.max_stage_replicas
    if total is not None and count * model.min_replicas > total:
        raise ConfigError(
            f"{where}{count} stages need at least {count * model.min_replicas} instances,"
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
            raise ConfigError(
                f"{where}stage_spans: '{text}' is invalid. Write FIRST-LAST, for example 0-5"
            )
        spans.append(LayerSpan(int(found[1]), int(found[2])))
    return tuple(spans)


def check_limits_given(roles: RolesConfig | None, given: Container[str], where: str) -> None:
    """With roles there are no other limits, not even those that would be the defaults. Raises
    ConfigError."""
    for name in ("min_replicas", "max_replicas"):
        if roles is not None and name in given:
            raise ConfigError(
                f"{where}: {name} and roles are both set. Set the limits of each role instead"
            )
