"""A model whose files change after it was published, in a whole pool: who is told, and how soon."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
WAIT_S = 120.0
BODY = {"model": "tiny", "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True}
AT_ZERO = "    min_replicas: 0\n    idle_s: 1\n"


def spoil(directory: Path) -> None:
    """Another last byte in the last file of weights."""
    victim = sorted(directory.glob("*.safetensors"))[-1]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 0xFF
    victim.write_bytes(content)


def test_requests_of_a_model_that_cannot_be_loaded_end_soon_and_a_repaired_one_serves(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    shutil.copytree(tiny_model, model)
    shutil.copytree(tiny_model, kept)
    caplog.set_level(logging.INFO)
    with (
        LocalPool(model, tmp_path, AT_ZERO, device="timed", workers=1, placement="none") as pool,
        httpx.Client(base_url=pool.url, timeout=patient(WAIT_S), trust_env=False) as client,
    ):
        spoil(model)
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert error["code"] == "load_failed", error
        assert "checksum" in error["message"]
        assert int(answer.headers["Retry-After"]) >= 1
        (shown,) = client.get("/admin/models").json()["data"]
        assert "checksum" in shown["problem"]
        metrics = client.get("/metrics").text
        assert 'livescale_model_problem{model="tiny"} 1.0' in metrics
        assert 'livescale_failed_loads_total{model="tiny"}' in metrics

        def warnings() -> list[str]:
            return [r.message for r in caplog.records if r.levelno == logging.WARNING]

        # News of the pool come by another way than answers.
        wait_until(
            lambda: any("tiny: cannot be loaded now" in line for line in warnings()),
            "a warning that the model cannot be loaded",
        )
        assert len(warnings()) <= 2, "the first failure, and that the model is given up"

        # Put right by hand: nothing has to be told to the pool.
        for file in kept.iterdir():
            shutil.copy(file, model / file.name)
        statuses: list[int] = []

        def is_served() -> bool:
            statuses.append(client.post("/v1/completions", json=BODY).status_code)
            return statuses[-1] == 200

        wait_until(is_served, "it serves again", WAIT_S)
        assert set(statuses) <= {503, 200}
        (shown,) = client.get("/admin/models").json()["data"]
        assert shown["problem"] is None
        assert 'livescale_model_problem{model="tiny"} 0.0' in client.get("/metrics").text
        assert any("loads succeed again" in record.message for record in caplog.records)


@pytest.mark.long
def test_a_directory_that_is_gone_and_a_copy_that_cannot_be_made_are_problems(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with (
        LocalPool(
            model,
            tmp_path,
            AT_ZERO,
            device="timed",
            workers=1,
            host_memory_bytes="64MiB",
            warm_spares="off",
        ) as pool,
        httpx.Client(base_url=pool.url, timeout=patient(WAIT_S), trust_env=False) as client,
    ):
        model.rename(tmp_path / "elsewhere")
        # The copy in host memory does as long as it is there.
        assert client.post("/v1/completions", json=BODY).status_code == 200
        wait_until(lambda: pool.gauge("instances") == 0, "it goes back to zero")
        pool.kill("agent 0")
        wait_until(
            lambda: bool(client.get("/admin/models").json()["data"][0]["problem"]),
            "no copy can be made, and that is shown",
        )
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "load_failed"
        assert "directory" in answer.json()["error"]["message"]
        (tmp_path / "elsewhere").rename(model)
        wait_until(
            lambda: client.post("/v1/completions", json=BODY).status_code == 200,
            "it serves again",
            WAIT_S,
        )
