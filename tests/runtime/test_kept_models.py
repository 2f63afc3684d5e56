"""Models that outlive their pool, and limits that change while it runs: all processes, timed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from livescale.common.settings import ConfigError
from livescale.main import main
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
JSON = {"Content-Type": "application/json"}
WAIT_S = 120.0
BODY = {"model": "new", "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True}
TIMED = {"device": "timed", "workers": 2, "timed_run_us": 2000, "timed_token_us": 20}


def client_of(pool: LocalPool) -> httpx.Client:
    return httpx.Client(base_url=pool.url, timeout=patient(WAIT_S), trust_env=False)


def models(client: httpx.Client) -> dict[str, dict]:
    return {model["name"]: model for model in client.get("/admin/models").json()["data"]}


def test_a_published_model_and_changed_limits_outlive_the_pool(
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    flags = {**TIMED, "state": str(tmp_path / "state")}
    with LocalPool(tiny_model, tmp_path, **flags) as pool, client_of(pool) as client:
        url = ["--url", pool.url]
        words = ["models", "add", str(other), "--name", "new", "--min-replicas", "0", *url]
        assert main(words) == 0
        assert "new: kept across restarts" in capsys.readouterr().out
        third = {"path": str(tiny_model), "name": "third", "min_replicas": 0}
        assert client.post("/admin/models", json=third).json()["survives_restart"]
        assert client.request("DELETE", "/admin/models/third", headers=JSON).status_code == 202
        with pytest.raises(ConfigError, match="another pool uses it"):
            LocalPool(tiny_model, tmp_path, **flags)

        # Limits hold at once, and for a new life of the controller.
        assert main(["models", "set", "tiny", "--min-replicas", "2", "--priority", "4", *url]) == 0
        assert "tiny: 2 to 2 instances, priority 4" in capsys.readouterr().out
        wait_until(lambda: models(client)["tiny"]["instances"] == {"serving": 2}, "it grows")
        refused = client.patch("/admin/models/tiny", json={"max_replicas": 1})
        assert refused.status_code == 400
        assert "min_replicas is 2" in refused.json()["error"]["message"]
        before = pool.pool.pids()["controller"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: pool.pool.pids().get("controller", before) != before, "it is back")
        wait_until(lambda: models(client)["tiny"]["state"] == "serving", "it knows the pool")
        assert models(client)["tiny"]["min_replicas"] == 2
        changed = {"min_replicas": 1, "max_replicas": 1, "priority": 9}
        # The gateway may not have found the new controller yet: that is a 503.
        patch = partial(client.patch, "/admin/models/tiny", json=changed)
        wait_until(lambda: patch().status_code == 200, "its limits can be changed")
        wait_until(lambda: models(client)["tiny"]["instances"] == {"serving": 1}, "it shrinks")

    with LocalPool(tiny_model, tmp_path, **flags) as pool, client_of(pool) as client:
        shown = models(client)
        assert set(shown) == {"tiny", "new"}
        assert {key: shown["tiny"][key] for key in changed} == changed
        assert client.post("/v1/completions", json=BODY).status_code == 200
        page = client.get("/metrics").text
        for state in ("starting", "loading", "live", "serving", "draining"):
            for name in shown:
                assert (
                    f'livescale_instances{{model="{name}",role="unified",state="{state}"}}' in page
                )

    shutil.rmtree(other)
    caplog.clear()
    with LocalPool(tiny_model, tmp_path, **flags) as pool, client_of(pool) as client:
        shown = models(client)
        assert shown["tiny"]["state"] == "serving"
        assert shown["new"]["state"] == "failed"
        assert str(other) in shown["new"]["problem"]
        assert client.get("/health").status_code == 200
        lines = [r for r in caplog.records if r.levelno >= logging.ERROR and "new" in r.message]
        assert len(lines) == 1
        assert client.post("/v1/completions", json=BODY).status_code == 404
        # It can be published anew, or forgotten.
        shutil.copytree(tiny_model, other)
        again = client.post("/admin/models", json={"path": str(other), "name": "new"})
        assert again.status_code == 201, again.text
        assert again.json()["problem"] is None


def test_without_a_state_directory_that_is_said(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what the model cannot do with so little memory for KV."""
    flags = {**TIMED, "kv_bytes": "64KiB", "host_memory_bytes": "64MiB"}
    with LocalPool(tiny_model, tmp_path, **flags) as pool, client_of(pool) as client:
        assert models(client)["tiny"]["survives_restart"]
        url = ["--url", pool.url]
        assert main(["models", "add", str(tiny_model), "--name", "new", *url]) == 0
        said = capsys.readouterr().out
        assert "kept until the pool ends" in said
        (warning,) = models(client)["new"]["warnings"]
        for number in (pool.pool.models[0].request_tokens_max, 4096, 65536):
            assert str(number) in warning
        assert warning in said
        assert not client.patch("/admin/models/tiny", json={"priority": 1}).json()[
            "survives_restart"
        ]
