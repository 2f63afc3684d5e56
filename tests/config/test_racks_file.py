"""The file that says which machines stand in which rack."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.common.settings import ConfigError
from livescale.config.racks import read_racks
from livescale.config.reading import load_config
from livescale.runtime.supervisor.supervisor import Pool


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "racks.yaml"
    path.write_text(text)
    return path


def test_hosts_are_in_racks(tmp_path: Path) -> None:
    path = written(tmp_path, "a: [h0, h1]\n7: [12]\nempty: []\n")
    assert read_racks(path) == {"h0": "a", "h1": "a", "12": "7"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[h0]", "must be a mapping"),
        ("a: h0", "a must be a list of hosts, not 'h0'"),
        ("a: [h0]\nb: [h1, h0]", "b: h0 is in a already"),
        ("a: [h0]\na: [h1]", "racks.yaml, line 2"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_racks(written(tmp_path, text))


def test_the_file_is_sought_beside_the_configuration_and_read_before_the_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(f"racks: racks.yaml\nmodels: [{tiny_model}]\n")
    config = load_config(pool, [], {}, {})
    assert config.racks == str(tmp_path / "racks.yaml")
    with pytest.raises(ConfigError, match=r"racks.yaml: No such file"):
        Pool(config)
