"""What is said of a model when it is published, though it can be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from livescale.config.reading import load_config
from livescale.engine.base.errors import ModelError
from livescale.engine.files.make import END, END_ID
from livescale.runtime.models.catalog import CatalogEntry, prepare_models


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def prepared(model: Path, tmp_path: Path) -> CatalogEntry:
    path = tmp_path / "pool.yaml"
    path.write_text(f"kv_bytes: {1 << 30}\nmodels:\n  - {{path: '{model}'}}\n")
    [entry] = prepare_models(load_config(path, [], {}, {}))
    return entry


@pytest.mark.parametrize(("tokens", "named"), [(1, 1), (5, 5), (7, 5)])
def test_ids_that_the_embedding_lacks_are_named(
    model: Path, tmp_path: Path, tokens: int, named: int
) -> None:
    assert prepared(model, tmp_path).warnings == ()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    first = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|{number}|>") for number in range(tokens)])
    tokenizer.save(str(model / "tokenizer.json"))
    [warning] = prepared(model, tmp_path).warnings
    assert f"vocab_size is {first}" in warning
    listed = [number for number in range(tokens) if f"'<|{number}|>' ({first + number})" in warning]
    assert listed == list(range(named))
    assert ("and 2 more" in warning) == (tokens > named)


@pytest.mark.parametrize(
    ("files", "is_named"),
    [
        ({}, False),
        ({"generation_config.json": {"eos_token_id": [9, END_ID]}}, False),
        ({"generation_config.json": {"eos_token_id": [9, 8]}}, True),
        ({"generation_config.json": {"eos_token_id": 9}}, True),
        ({"generation_config.json": {"eos_token_id": None}}, False),
        (
            {"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 9}},
            True,
        ),
        (
            {
                "generation_config.json": {"eos_token_id": None},
                "config.json": {"eos_token_id": None},
            },
            True,
        ),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|user|>"}}}, True),
        ({"tokenizer_config.json": {"eos_token": None}}, False),
    ],
)
def test_an_end_token_that_ends_nothing_is_named(
    files: dict[str, dict[str, object]], is_named: bool, model: Path, tmp_path: Path
) -> None:
    for name, changes in files.items():
        read = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(read | changes))
    warnings = prepared(model, tmp_path).warnings
    assert len(warnings) == is_named
    for warning in warnings:
        token = "<|user|>" if "tokenizer_config.json" in files else END
        number = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(token)
        assert f"{token!r} ({number}) does not end answers" in warning


def test_a_tokenizer_that_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        prepared(model, tmp_path)


def test_tokenizer_files_that_contradict_each_other_are_refused_with_both(
    model: Path, tmp_path: Path
) -> None:
    (model / "added_tokens.json").write_text('{"<|im|>": 7}')
    with pytest.raises(ModelError) as refused:
        prepared(model, tmp_path)
    known = Tokenizer.from_file(str(model / "tokenizer.json")).id_to_token(7)
    assert str(refused.value) == (
        f"{model}/added_tokens.json and {model}/tokenizer.json contradict each other:"
        f" the id 7 is '<|im|>' in the former, and {known!r} in the latter"
    )
