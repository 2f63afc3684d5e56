"""`livescale bench ray`: three losses under load, from the command line to the figures."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from ray_bed import NEEDS_RAY

from interrupted import check_interrupt, nothing_is_left
from livescale.main import main
from slowness import patient, patient_ms

pytestmark = [
    *NEEDS_RAY,
    pytest.mark.long,
    pytest.mark.usefixtures("network_namespaces"),
]
# Ray needs a minute for a node that is silent: not waited for here.
RAY_PATIENCE = ("--ray-patience-s", "1")


def words(model: Path, folder: Path, *more: str) -> list[str]:
    own = ("--device", "timed", "--model", str(model), "--folder", str(folder))
    lost_after = ("--lost-after-ms", str(patient_ms(2000)))
    return ["bench", "ray", *own, *RAY_PATIENCE, *lost_after, *more]


def test_three_losses(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    # How long pauses are on a machine that does other things, too, is not tested.
    more = ("--json", str(file), "--pause-s-max", str(patient(60)))
    code = main(words(tiny_model, tmp_path / "run", *more))
    told = capsys.readouterr()
    log = (tmp_path / "run" / "pool.log").read_text(errors="replace")
    assert code == 0, f"{told.out}{told.err}{log[-6000:]}"
    found = json.loads(file.read_text())
    assert found["hosts"] == len(found["joined_s_by_host"]) == 3
    assert found["joined_s"] > 0
    assert found["requests"] > 0
    assert found["failed"] == found["token_mismatches"] == found["processes_left"] == 0
    losses = found["losses"]
    assert list(losses) == ["actor_killed", "raylet_killed", "node_silent"]
    for loss in losses.values():
        assert loss["streams"] > 0
        assert loss["noticed_s"] > 0
    assert 0 < losses["actor_killed"]["ray_actor_noticed_s"] <= losses["actor_killed"]["back_s"]
    assert losses["raylet_killed"]["back_s"] > losses["raylet_killed"]["noticed_s"]
    # A silent host is known by nothing but its silence.
    assert found["silent_loss_noticed_s"] == losses["node_silent"]["noticed_s"]
    # The gateway may go on elsewhere before the controller has given the host up.
    assert found["healed_s"] >= losses["node_silent"]["healed_s"] > 0
    assert nothing_is_left(psutil.Process().pid)


def test_ctrl_c_in_the_middle_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    check_interrupt(words(tiny_model, tmp_path / "run"), "hosts have joined")
