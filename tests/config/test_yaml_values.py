"""What a file's values stand for, and what no reader of YAML can make of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.common.settings import Setting
from livescale.config.model import MODEL_SETTINGS
from livescale.config.pool import SETTINGS
from livescale.config.reading import load_config


def optional(settings: tuple[Setting, ...]) -> list[str]:
    return [setting.name for setting in settings if setting.is_optional]


@pytest.mark.parametrize("word", ["none", "None", "'none'", "null", "~"])
@pytest.mark.parametrize("name", optional(SETTINGS))
def test_no_value_is_written_alike_in_files(tmp_path: Path, name: str, word: str) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(f"{name}: {word}\nmodels: [{tmp_path}]\n")
    assert getattr(load_config(file, [], {}, {}), name) is None


@pytest.mark.parametrize("word", ["none", "null"])
@pytest.mark.parametrize("name", optional(MODEL_SETTINGS))
def test_no_value_is_written_alike_for_models(tmp_path: Path, name: str, word: str) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(f"models: [{{path: {tmp_path}, {name}: {word}}}]\n")
    assert getattr(load_config(file, [], {}, {}).models[0], name) is None


@pytest.mark.parametrize("word", ["on", "off"])
@pytest.mark.parametrize(
    "name", [setting.name for setting in SETTINGS if "off" in setting.about.choices]
)
def test_words_that_yaml_reads_as_booleans(tmp_path: Path, name: str, word: str) -> None:
    for written in (word, f"'{word}'"):
        file = tmp_path / "pool.yaml"
        file.write_text(f"{name}: {written}\ntls_dir: certificates\nmodels: [{tmp_path}]\n")
        assert getattr(load_config(file, [], {}, {}), name) == word
