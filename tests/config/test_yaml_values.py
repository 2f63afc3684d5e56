"""What a file's values stand for, and what no reader of YAML can make of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.common.settings import ConfigError, Setting, read_yaml
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("!!timestamp foo", "line 2, column 6: 'foo' is not a valid timestamp"),
        ("2024-13-45", "line 2, column 6: '2024-13-45' is not a valid timestamp: month"),
        ("!!int ''", "line 2, column 6: '' is not a valid int"),
        ("!!int x", "line 2, column 6: 'x' is not a valid int"),
        ("!!float ''", "line 2, column 6: '' is not a valid float"),
        ("!!bool maybe", "line 2, column 6: 'maybe' is not a valid bool"),
        ("[1, !!bool maybe]", "line 2, column 10: 'maybe' is not a valid bool"),
        ("{!!bool maybe: 1}", "line 2, column 7: 'maybe' is not a valid bool"),
        ("!!map [1]", "line 2, column 6: "),
        ("!!map x", "line 2, column 6: "),
        ("!!set [1]", "line 2, column 6: "),
        ("!!omap x", "line 2, column 6: "),
        ("!!seq {a: 1}", "line 2, column 6: "),
        ("!!binary é", "line 2, column 6: "),
        ("!!python/none", "line 2, column 6: "),
        ("[" * 3000 + "]" * 3000, ": lists or mappings are nested too deeply"),
        ("{a: " * 3000 + "}" * 3000, ": lists or mappings are nested too deeply"),
    ],
)
def test_what_yaml_cannot_read_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(f"models: []\nkey: {text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_yaml(file)
    assert str(raised.value).startswith(str(file))
    assert said in str(raised.value)
