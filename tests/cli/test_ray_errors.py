"""`livescale serve --ray`, where it cannot: one sentence, before anything is started."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from commands import livescale

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


def refusal(*words: object) -> tuple[int, str]:
    code, _, error = livescale("serve", *words)
    return code, error.strip().splitlines()[-1]


@pytest.mark.usefixtures("machine")
def test_nothing_listens_there(tiny_model: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        code, line = refusal(tiny_model, "--ray", address)
    assert (code, line) == (2, f"livescale serve: --ray {address}: Connection refused")


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:0"])
def test_what_is_no_address_of_a_cluster(tiny_model: Path, address: str) -> None:
    code, line = refusal(tiny_model, "--ray", address)
    assert code == 2
    assert address in line


def test_the_file_is_read_first(tmp_path: Path) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text("models: [m]\nray: {hosts_min: 3, hosts_max: 2}\n")
    code, line = refusal("-c", config, "--ray", "127.0.0.1:1")
    assert code != 0
    assert line.endswith("ray.hosts_min is 3, above hosts_max 2")


def test_nodes_have_no_certificates(tiny_model: Path, tmp_path: Path) -> None:
    code, line = refusal(tiny_model, "--ray", "127.0.0.1:1", "--tls-dir", tmp_path)
    assert code != 0
    assert "tls_dir is set, but ray.tls_dir is not" in line


def test_another_head_would_find_no_hosts(tiny_model: Path) -> None:
    code, line = refusal(tiny_model, "--ray", "127.0.0.1:1", "--standby")
    assert code != 0
    assert "--standby does not support --ray. Ray ends the nodes" in line
