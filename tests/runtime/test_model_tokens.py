"""`max_model_tokens`, from the pool's file to its catalog and its state. What clients see of it is
in `tests/gateway/test_gateway_length.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.config.reading import changed_model, load_config, model_of
from livescale.runtime.models.catalog import prepare_models, published
from livescale.runtime.models.restoration import restored_models, state_of
from livescale.runtime.models.state_directory import PoolState
from livescale.runtime.wire.protocol import PublishedModel

OWN = 4096
"""Tokens that the tiny model takes by itself."""
BLOCK_TOKENS = 16


def pool_of(
    model: Path, tmp_path: Path, limit: object = None, kv_bytes: int = 1 << 30
) -> PoolConfig:
    path = tmp_path / "pool.yaml"
    given = "" if limit is None else f", max_model_tokens: {limit}"
    path.write_text(
        f"kv_bytes: {kv_bytes}\ntuning: {{block_tokens: {BLOCK_TOKENS}}}\n"
        f"models:\n  - {{path: '{model}', name: m{given}}}\n"
    )
    return load_config(path, [], {}, {})


def prepared(config: PoolConfig) -> PublishedModel:
    [entry] = prepare_models(config)
    [model] = published(config, config.models[0], entry)
    return model


@pytest.mark.parametrize("limit", [None, 100, 1000, OWN])
def test_kv_for_the_limit_is_enough(tiny_model: Path, tmp_path: Path, limit: int | None) -> None:
    tokens = OWN if limit is None else limit
    spec = prepared(pool_of(tiny_model, tmp_path)).entry.spec
    block_bytes = BLOCK_TOKENS * spec.kv_bytes_per_token
    # The last generated token needs no KV.
    enough = -(-(tokens - 1) // BLOCK_TOKENS)
    entry = prepared(pool_of(tiny_model, tmp_path, limit, enough * block_bytes)).entry
    assert (entry.request_tokens_max, entry.warnings) == (tokens, ())
    short = (enough - 1) * block_bytes
    entry = prepared(pool_of(tiny_model, tmp_path, limit, short)).entry
    assert entry.request_tokens_max == (enough - 1) * BLOCK_TOKENS + 1
    [warning] = entry.warnings
    assert f"instead of {tokens}, because kv_bytes is {short}" in warning
    assert warning.endswith(f"set kv_bytes to {enough * block_bytes}")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (0, "max_model_tokens is 0 tokens, below the least value 2"),
        (-1, "max_model_tokens is -1 tokens, below the least value 2"),
        (1, "max_model_tokens is 1 tokens, below the least value 2"),
        ("much", "max_model_tokens must be a whole number, not 'much'"),
        (1.5, "max_model_tokens must be a whole number, not 1.5"),
        ("true", "max_model_tokens must be a whole number, not yes or no"),
        (OWN + 1, f"model m: max_model_tokens is {OWN + 1}, above the model's length of {OWN}"),
        (1 << 62, f"max_model_tokens is {1 << 62}, above the model's length of {OWN} tokens"),
    ],
)
def test_what_is_no_limit_of_the_model_is_refused(
    tiny_model: Path, tmp_path: Path, limit: object, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        prepared(pool_of(tiny_model, tmp_path, limit))
    assert words in str(refused.value)


def test_a_published_limit_outlives_the_pool_and_is_not_changed(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = pool_of(tiny_model, tmp_path)
    new = model_of({"path": str(tiny_model), "name": "new", "max_model_tokens": 100}, config)
    kept = restored_models(config, PoolState((new,)), lambda _: None)
    assert [model.entry.request_tokens_max for model in kept.models] == [OWN, 100]
    assert state_of(config, kept) == PoolState((new,))
    with pytest.raises(ConfigError, match="max_model_tokens"):
        changed_model(new, {"max_model_tokens": 200}, config)


def test_a_kept_limit_that_is_above_a_shorter_model_leaves_it_unserved(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = pool_of(tiny_model, tmp_path)
    new = model_of({"path": str(tiny_model), "name": "new", "max_model_tokens": OWN + 1}, config)
    kept = restored_models(config, PoolState((new,)), lambda _: None)
    [unserved] = kept.unserved
    assert f"max_model_tokens is {OWN + 1}" in unserved.problem
    assert str(OWN) in unserved.problem
