"""`livescale bench hosts`: joins at a small scale, who is named when one fails, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from livescale.common.errors import UserError
from livescale.lab.bench.hosts.hosts import HostsBenchOptions, run_hosts
from livescale.lab.bench.hosts.simulated_hosts import join_simulated
from livescale.main import main


@pytest.mark.usefixtures("machine")
def test_real_hosts_join_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ("--real", "2", "--simulated", "0", "--json", str(file))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert main(["bench", "hosts", *words]) == 0
    figures = json.loads(file.read_text())
    assert "simulated" not in figures
    real = figures["real"]
    assert real["hosts"] == 2
    assert 0 < real["fastest_s"] <= real["median_s"] <= real["slowest_s"]
    # The last host began after the first command.
    assert real["slowest_s"] <= real["all_joined_s"]
    assert 0 < real["cpu_s_per_host"] < real["cpu_s_hosts"]
    assert real["cpu_s_head"] > 0
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert left == []


@pytest.mark.usefixtures("machine")
def test_a_host_that_does_not_come_is_named() -> None:
    options = HostsBenchOptions(real=1, simulated=0, patience_s=1e-9)
    with pytest.raises(UserError, match=r"host0, one of 1, is not there .* its last words: "):
        run_hosts(options, lambda _: None)


def test_simulated_hosts_join_at_once_and_serve() -> None:
    found = join_simulated(3)
    assert (found.hosts, found.workers) == (3, 24)
    assert 0 < found.joined_ns < found.serving_ns
    assert len(found.step_ns) > 1
    # Virtual time is the same again; what steps take is not.
    again = join_simulated(3)
    assert (again.joined_ns, again.serving_ns) == (found.joined_ns, found.serving_ns)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--real", "-1"], "--real"),
        (["--real", "1000"], "--real"),
        (["--simulated", "1000"], "--simulated"),
        (["--real", "0", "--simulated", "0"], "--real"),
        (["--patience-s", "0"], "--patience-s"),
    ],
)
def test_wrong_flags_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main(["bench", "hosts", *words]) == 1
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
