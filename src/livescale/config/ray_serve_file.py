"""A file as Ray Serve's users write it (`serveConfigV2`, with `llm_configs`), read as a pool's.

Only what means the same here is taken; all else is an error that names it.
"""

from __future__ import annotations

from pathlib import Path

from livescale.common.settings import ConfigError, as_mapping, check_keys, kind_of

_APPLICATION = ("name", "route_prefix", "import_path", "args")
_LLM = ("model_loading_config", "deployment_config", "accelerator_type")
_AUTOSCALING = ("min_replicas", "max_replicas", "target_ongoing_requests")
#: of a file, beside the applications: where Serve itself listens and logs, which says nothing here
_BESIDE = ("applications", "grpc_options", "http_options", "logging_config", "proxy_location")


def pool_document(document: dict[object, object], path: Path) -> dict[object, object]:
    """The document of a pool: `document` itself, unless its key is `applications`. Raises
    ConfigError."""
    if "applications" not in document:
        return document
    check_keys(document, _BESIDE, str(path))
    models: list[object] = []
    shared: dict[str, object] = {}
    for where, application in _items(document["applications"], f"{path}: applications"):
        check_keys(application, _APPLICATION, where)
        arguments = as_mapping(application.get("args"), f"{where}.args")
        check_keys(arguments, ("llm_configs",), f"{where}.args")
        for place, llm in _items(arguments.get("llm_configs"), f"{where}.args.llm_configs"):
            models.append(_model(llm, place, shared))
    return {"models": models, "ray": shared}


def _model(llm: dict[object, object], where: str, shared: dict[str, object]) -> object:
    """An entry of `models`; what holds for the whole pool goes into `shared`."""
    check_keys(llm, _LLM, where)
    loading = as_mapping(llm.get("model_loading_config"), f"{where}.model_loading_config")
    check_keys(loading, ("model_id", "model_source"), f"{where}.model_loading_config")
    for key in ("model_id", "model_source"):
        if key not in loading:
            raise ConfigError(f"{where}.model_loading_config: {key} is missing")
    deployment = as_mapping(llm.get("deployment_config", {}), f"{where}.deployment_config")
    check_keys(deployment, ("autoscaling_config",), f"{where}.deployment_config")
    place = f"{where}.deployment_config.autoscaling_config"
    scaling = as_mapping(deployment.get("autoscaling_config", {}), place)
    check_keys(scaling, _AUTOSCALING, place)
    accelerator = llm.get("accelerator_type")
    if shared and shared["accelerator_type"] != accelerator:
        raise ConfigError(
            f"{where}: accelerator_type differs from the first one. A pool has one accelerator_type"
        )
    shared["accelerator_type"] = accelerator
    return {"name": loading["model_id"], "path": loading["model_source"], **scaling}


def _items(entries: object, where: str) -> list[tuple[str, dict[object, object]]]:
    """The mappings of a list, each with its place."""
    if not isinstance(entries, list):
        raise ConfigError(f"{where} must be a list, not {kind_of(entries)}")
    places = [f"{where}[{index}]" for index in range(len(entries))]
    return [(place, as_mapping(entry, place)) for place, entry in zip(places, entries, strict=True)]
