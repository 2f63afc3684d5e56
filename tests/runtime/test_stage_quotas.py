"""Models in stages, as a configuration file has them: which stages are refused, and what requests
may have of the KV that leaders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.common.errors import UserError
from livescale.config.reading import load_config
from livescale.engine.files.make import make_model
from livescale.runtime.models.catalog import CatalogEntry, prepare_models

BLOCK_TOKENS = 128


def prepared(model: Path, tmp_path: Path, kv_bytes: int, limits: str, workers: int) -> CatalogEntry:
    path = tmp_path / "pool.yaml"
    path.write_text(
        f"workers: {workers}\nkv_bytes: {kv_bytes}\ntuning: {{block_tokens: {BLOCK_TOKENS}}}\n"
        f"models:\n  - {{path: '{model}', {limits}}}\n"
    )
    [entry] = prepare_models(load_config(path, [], {}, {}))
    return entry


@pytest.mark.parametrize(
    ("limits", "is_tied", "problem"),
    [
        ("stage_spans: '0-2 3-6'", False, r"stage \[3, 6\) does not begin with layer 2"),
        ("stage_spans: '0-3 2-6'", False, r"stage \[2, 6\) does not begin with layer 3"),
        ("stage_spans: '0-3 3-5'", False, r"has 6 layers, its last stage is \[3, 5\)"),
        ("stages: 5", False, "has 4 decoder layers: it cannot have 5 stages"),
        ("stages: 2", True, "its head computes with the embedding's matrix"),
        ("stage_spans: '0-3 3-6'", True, "its head computes with the embedding's matrix"),
    ],
)
def test_stages_that_the_model_cannot_have_are_refused(
    tmp_path: Path, limits: str, is_tied: bool, problem: str
) -> None:
    make_model(tmp_path / "model", "tiny", tied=is_tied)
    with pytest.raises(UserError, match=problem):
        prepared(tmp_path / "model", tmp_path, 1 << 30, limits, workers=8)


@pytest.mark.parametrize(
    ("limits", "workers", "leaders"),
    [
        ("stages: 2", 2, 1),
        ("stages: 2", 6, 5),
        ("stages: 2, min_replicas: 2", 6, 4),
        ("stages: 2, max_replicas: 3", 6, 3),
        ("stages: 4, max_stage_replicas: 6", 8, 3),
    ],
)
def test_what_is_accepted_fits_into_the_share_of_a_leader(
    tiny_model: Path, tmp_path: Path, limits: str, workers: int, leaders: int
) -> None:
    stage = prepared(tiny_model, tmp_path, 1 << 30, limits, workers)
    assert stage.warnings == ()
    # An instance has KV for the layers of the largest stage.
    block_bytes = BLOCK_TOKENS * stage.spec.kv_bytes_per_token // int(limits[8])
    for blocks in (1, 3):
        entry = prepared(tiny_model, tmp_path, blocks * leaders * block_bytes, limits, workers)
        assert entry.request_tokens_max == blocks * BLOCK_TOKENS + 1
        [warning] = entry.warnings
        assert f"requests may have {entry.request_tokens_max} tokens" in warning
        enough = prepared(tiny_model, tmp_path, int(warning.split()[-1]), limits, workers)
        assert (enough.warnings, enough.request_tokens_max) == ((), entry.spec.model_tokens_max)
    too_few = leaders * block_bytes - 1
    with pytest.raises(UserError, match=f"kv_bytes {too_few} holds no KV block of model"):
        prepared(tiny_model, tmp_path, too_few, limits, workers)
