"""Models that come to a running pool and leave it, with all its processes (timed workers)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from livescale.messages.commands import Dispatch
from livescale.telemetry.record.record import RequestLine, StepLine, read_record
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
JSON = {"Content-Type": "application/json"}
WAIT_S = 120.0


def states(client: httpx.Client) -> dict[str, str]:
    return {model["name"]: model["state"] for model in client.get("/admin/models").json()["data"]}


def test_a_model_comes_serves_from_zero_and_leaves(tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    body = {"model": "new", "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True}
    timed = {"timed_run_us": 2000, "timed_token_us": 20, "host_memory_bytes": "64MiB"}
    with (
        LocalPool(tiny_model, tmp_path, device="timed", workers=2, **timed) as pool,
        httpx.Client(base_url=pool.url, timeout=patient(WAIT_S), trust_env=False) as client,
    ):
        assert client.post("/v1/completions", json=body).status_code == 404
        asked = {"path": str(other), "name": "new", "min_replicas": 0, "idle_s": 3600}
        added = client.post("/admin/models", json=asked)
        assert added.status_code == 201, added.text
        assert states(client) == {"tiny": "serving", "new": "at_zero"}
        assert client.get("/health").status_code == 200

        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert states(client)["new"] == "serving"

        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: {")
            gone = client.request("DELETE", "/admin/models/new", headers=JSON)
            assert gone.status_code == 202, gone.text
            assert client.post("/v1/completions", json=body).status_code == 404
            rest = [line for line in events if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: states(client) == {"tiny": "serving"}, "removed from all workers")
        assert 'model="new"' not in client.get("/metrics").text
        assert client.post("/v1/completions", json={**body, "model": "tiny"}).status_code == 200
        usage = client.get("/admin/models/tiny").json()["usage"]
        assert usage["requests"] == 1
        assert usage["device_seconds"] > 0
        wait_until(lambda: len(lines_of(pool, "new")) == 2, "its requests are recorded")

    first = lines_of(pool, "new")[0]
    # Where the time of the first request went: read, waited for an instance, computed.
    assert first.arrived_ns is not None
    assert first.first_dispatched_ns is not None
    assert first.arrived_ns <= first.queued_ns < first.first_dispatched_ns <= first.token_ns[0]


def lines_of(pool: LocalPool, model: str) -> list[RequestLine]:
    lines = [line for line in read_record(pool.record) if isinstance(line, RequestLine)]
    return [line for line in lines if line.model == model]


def test_what_cannot_be_published_is_said(tiny_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    victim = sorted(broken.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with (
        LocalPool(
            tiny_model, tmp_path, device="timed", workers=1, host_memory_bytes="64MiB"
        ) as pool,
        httpx.Client(base_url=pool.url, timeout=patient(WAIT_S), trust_env=False) as client,
    ):
        for body, status, says in [
            ({"path": str(broken)}, 400, victim.name),
            ({"path": str(tiny_model), "name": "tiny"}, 409, "tiny"),
            ({"path": str(tiny_model), "name": "x", "max_replicas": 9}, 400, "max_replicas"),
            ({"path": str(tiny_model), "name": "x", "schedule": "tea time"}, 400, "schedule"),
        ]:
            response = client.post("/admin/models", json=body)
            assert response.status_code == status, response.text
            assert says in response.json()["error"]["message"]
        assert states(client) == {"tiny": "serving"}


@pytest.mark.long
def test_deaths_around_a_published_model(tiny_model: Path, tmp_path: Path) -> None:
    """A new controller knows it; a stream survives its worker, also of a model that leaves."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    tokens = 300
    body = {"model": "new", "prompt": [11, 12, 13], "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    sizes = {"timed_run_us": patient_ms(5000), "timed_token_us": 20, "host_memory_bytes": "64MiB"}
    with (
        LocalPool(tiny_model, tmp_path, device="timed", workers=3, **sizes) as pool,
        httpx.Client(base_url=pool.url, timeout=patient(WAIT_S), trust_env=False) as client,
    ):
        asked = {"path": str(other), "name": "new", "min_replicas": 0, "idle_s": 3600}
        assert client.post("/admin/models", json=asked).status_code == 201
        before = pool.pool.pids()["controller"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: pool.pool.pids().get("controller", before) != before, "it is back")
        with client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200, stream.read()
            events = (json.loads(line[6:]) for line in stream.iter_lines() if line[6:7] == "{")
            token_ids = [token for _ in range(5) for token in ids_of(next(events))]
            assert client.request("DELETE", "/admin/models/new", headers=JSON).status_code == 202
            os.kill(pool.pool.pids()[f"worker {last_asked(pool)}"], signal.SIGKILL)
            token_ids += [token for event in events for token in ids_of(event)]
        assert len(token_ids) == tokens
        # A timed worker's token depends on prompt and position alone: none is lost or repeated.
        again = {**body, "model": "tiny", "stream": False}
        expected = client.post("/v1/completions", json=again).json()["choices"][0]["token_ids"]
        assert token_ids == expected
        wait_until(lambda: len(lines_of(pool, "new")) == 1, "it is recorded")
        assert lines_of(pool, "new")[0].attempts == 2
        wait_until(lambda: states(client) == {"tiny": "serving"}, "removed from all workers")


def ids_of(event: dict) -> list[int]:
    assert "error" not in event, event
    return [token for choice in event["choices"] for token in choice["token_ids"]]


def last_asked(pool: LocalPool) -> int:
    """The worker that was given a request last, once that is on record. Others may hold spares."""

    def given() -> list[int]:
        steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
        commands = [command for line in steps for command in line.commands]
        return [c.worker.worker for c in commands if isinstance(c, Dispatch)]

    wait_until(lambda: given() != [], "a request is on record")
    return given()[-1]
