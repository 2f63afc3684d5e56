"""What a pool starts with: the configuration, and what the state directory kept.

The configuration says which models there are and where they lie; the state adds what was published
besides, and limits that were changed while the configuration stayed the same. A kept model that
cannot be served keeps no pool from starting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import msgspec

from livescale.common.settings import ConfigError
from livescale.config.model import CHANGEABLE_SETTINGS, ModelConfig
from livescale.config.pool import PoolConfig
from livescale.config.reading import changed_model, checked_model
from livescale.engine.base.errors import ModelError
from livescale.runtime.models.catalog import prepare_model, prepare_models, published
from livescale.runtime.models.state_directory import ChangedModel, PoolState
from livescale.runtime.wire.protocol import Catalog, CatalogEntry, UnservedModel

_log = logging.getLogger(__name__)


def restored_models(
    config: PoolConfig, state: PoolState, fits: Callable[[tuple[CatalogEntry, ...]], object]
) -> Catalog:
    """Prepare all models; those that were kept and cannot be served are listed apart. `fits` raises
    ConfigError where the pool has no room for these together.

    Raises ModelError or ConfigError for what is wrong with a model of the configuration.
    """
    models = [
        model
        for settings, entry in zip(
            _with_changes(config, state), prepare_models(config), strict=True
        )
        for model in published(config, settings, entry)
    ]
    fits(tuple(model.entry for model in models))
    names = {model.settings.name for model in models}
    unserved = []
    for kept in state.published:
        if kept.name in names:
            _log.warning("model %s: the configuration replaces the saved model", kept.name)
            continue
        names.add(kept.name)
        try:
            settings = checked_model(kept, config)
            parts = published(config, settings, prepare_model(config, settings))
            fits(tuple(model.entry for model in (*models, *parts)))
        except (ModelError, ConfigError, OSError) as error:
            _log.error(
                "model %s was restored from the state and cannot be served: %s", kept.name, error
            )
            unserved.append(UnservedModel(kept, str(error)))
        else:
            models += parts
    return Catalog(tuple(models), unserved=tuple(unserved))


def state_of(config: PoolConfig, catalog: Catalog) -> PoolState:
    """What is to be kept of these models for the next start."""
    configured = {model.name: model for model in config.models}
    kept = [model.settings for model in catalog.unserved]
    changed = []
    for model in catalog.models:
        settings, before = model.settings, configured.get(model.settings.name)
        is_counted = model.entry.spec.stage is not None and not model.entry.spec.stage.is_first
        if model.is_leaving or is_counted:
            continue
        if before is None:
            kept.append(settings)
        elif settings != before and settings.path == before.path:
            changed.append(ChangedModel(_with_paths(before, os.path.abspath), settings))
    return PoolState(tuple(kept), tuple(changed))


def survives_restart(config: PoolConfig, settings: ModelConfig, *, is_kept: bool) -> bool:
    """The next start has this model, too, with these limits: by the configuration, or because the
    state directory keeps them."""
    before = {model.name: model for model in config.models}.get(settings.name)
    if before is None:
        return is_kept
    return settings == before or (is_kept and settings.path == before.path)


# -- helpers, in the order used -------------------------------------------------------------------


def _with_changes(config: PoolConfig, state: PoolState) -> list[ModelConfig]:
    """The configuration's models, with limits that were changed since. An entry that was edited
    meanwhile is the newer word."""
    changes = {change.configured.name: change for change in state.changed}
    models = []
    for model in config.models:
        change = changes.get(model.name)
        if change is not None and not _is_same_entry(change.configured, model):
            _log.warning(
                "model %s: the configuration changed and replaces the saved limits", model.name
            )
        elif change is not None:
            model = _changed(model, change.now, config)
        models.append(model)
    return models


def _is_same_entry(one: ModelConfig, other: ModelConfig) -> bool:
    """The same file may be named another way, or from another directory."""
    return _with_paths(one, os.path.realpath) == _with_paths(other, os.path.realpath)


def _with_paths(model: ModelConfig, of: Callable[[str], str]) -> ModelConfig:
    profile = None if model.stage_profile is None else of(model.stage_profile)
    return msgspec.structs.replace(model, path=of(model.path), stage_profile=profile)


def _changed(model: ModelConfig, now: ModelConfig, config: PoolConfig) -> ModelConfig:
    before, after = msgspec.to_builtins(model), msgspec.to_builtins(now)
    names = [setting.name for setting in CHANGEABLE_SETTINGS]
    changes = {name: after[name] for name in names if after[name] != before[name]}
    try:
        return changed_model(model, changes, config)
    except ConfigError as error:
        _log.warning("model %s: the saved limits are invalid: %s", model.name, error)
        return model
