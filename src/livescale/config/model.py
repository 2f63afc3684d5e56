"""The settings of one model of a pool; part of the one table of settings (`pool.py`)."""

from __future__ import annotations

from typing import Annotated

from livescale.common.settings import About, settings_of
from livescale.types import Value


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
    idle_s: Annotated[
        int, About("time without a request after which the last instance goes", "s", 0, 31_536_000)
    ] = 60
    priority: Annotated[
        int, About("models of higher priority get scarce devices first", "", -1000, 1000)
    ] = 0
    target_ongoing_requests: Annotated[
        int | None,
        About("unfinished requests per instance to scale to; the pool's if none", "requests", 1),
    ] = None
    schedule: Annotated[
        str,
        About(
            "limits by time of day (UTC): '08:00-20:00 min=2 max=6', more after a semicolon;"
            " the first that holds replaces the limits above"
        ),
    ] = ""


MODEL_SETTINGS = settings_of(ModelConfig)
CHANGEABLE_SETTINGS = tuple(
    setting
    for setting in MODEL_SETTINGS
    if setting.name
    in (
        *("min_replicas", "max_replicas", "idle_s", "priority"),
        *("target_ongoing_requests", "schedule"),
    )
)
"""Those of a model that can be changed while it runs."""
