"""`livescale serve` as a person runs it: starts, refuses when full, drains on Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from interrupted import python_without_forks
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")
LONG = 2000


def wait_s() -> float:
    return patient(120)


def steady() -> tuple[object, ...]:
    """A stream of LONG tokens, each of which takes so long at least, is still running when
    everything else has happened; and it has time to end, however busy the machine is."""
    timed = ("--device", "timed", "--timed-profile", f"linear:{1000 * patient_ms(2)}:67")
    patience = ("--drain-timeout-s", round(wait_s()), "--queue-timeout-s", round(wait_s()))
    return (*timed, *patience)


class Serve:
    """A running `livescale serve`."""

    def __init__(self, *words: object, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "livescale.main", "serve", *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("LIVESCALE_")} | environ,
            start_new_session=True,
        )
        self.url = ""
        self.printed: list[str] = []

    def wait_until_printed(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} was never printed: {self.printed}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def children(self) -> list[psutil.Process]:
        """All below the supervisor: its own, and what the gateway starts to render templates."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def own_children(self) -> int:
        return len(psutil.Process(self.process.pid).children())


@contextlib.contextmanager
def serve(*words: object, **environ: str) -> Iterator[Serve]:
    running = Serve(*words, **environ)
    killer = threading.Timer(wait_s(), running.process.kill)
    killer.start()
    try:
        running.url = running.wait_until_printed(r"http://[\d.:]+")[0]
        yield running
    finally:
        killer.cancel()
        running.end()


def body(max_tokens: int, stream: bool = True) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_request_that_is_printed_is_answered(
    tiny_model: Path, tmp_path: Path, has_keys: bool
) -> None:
    (tmp_path / "keys").write_text("secret\n")
    keys = ("--api-key-file", tmp_path / "keys") if has_keys else ()
    with serve(tiny_model, "--port", 0, *steady(), "--workers", 1, *keys) as running:
        curl = shlex.split(running.wait_until_printed(r"^try: (.*)")[1].replace("$KEY", "secret"))
        assert curl[0] == "curl"
        options = list(zip(curl[2::2], curl[3::2], strict=True))
        headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
        answer = httpx.post(
            curl[1], headers=headers, content=dict(options)["-d"], timeout=patient(60)
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16


def test_a_full_queue_is_refused_and_ctrl_c_lets_streams_finish(tiny_model: Path) -> None:
    small = (*steady(), "--workers", 1, "--run-tokens-max", 1)
    with serve(tiny_model, "--port", 0, *small, "--queue-requests-max", 1) as running:
        children = running.children()
        assert running.own_children() == 4  # controller, gateway, one agent, one worker
        answers: dict[int, list[int]] = {}
        statuses: list[int] = []
        started = threading.Barrier(2)

        def stream(number: int, count: int) -> None:
            tokens = answers.setdefault(number, [])
            with httpx.stream(
                "POST", f"{running.url}/v1/completions", json=body(count), timeout=wait_s()
            ) as response:
                statuses.append(response.status_code)
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        if number == 0 and not tokens:
                            started.wait(wait_s())
                        for choice in json.loads(line[6:])["choices"]:
                            tokens += choice.get("token_ids") or []

        def wait_for_gauge(row: str) -> None:
            with httpx.Client(timeout=wait_s()) as client:
                while f"livescale_{row}\n" not in client.get(f"{running.url}/metrics").text:
                    assert len(answers[0]) < LONG, f"never came true: {row}"

        threads = [threading.Thread(target=stream, args=(0, LONG))]
        threads[0].start()
        started.wait(wait_s())  # it runs: the instance is full now
        # One after the other: the second would be refused while the first is not dispatched.
        for number, row in ((1, 'running{model="tiny"} 2.0'), (2, 'waiting{model="tiny"} 1.0')):
            threads.append(threading.Thread(target=stream, args=(number, 5)))
            threads[-1].start()
            wait_for_gauge(f"num_requests_{row}")
        refused = httpx.post(f"{running.url}/v1/completions", json=body(1), timeout=wait_s())
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["message"]
        running.process.send_signal(signal.SIGINT)
        running.wait_until_printed("draining")
        for thread in threads:
            thread.join(wait_s())
        running.wait_until_printed("stopped")
        assert running.process.wait(wait_s()) == 0
        assert statuses == [200] * 3
        assert [len(answers[n]) for n in range(3)] == [LONG, 5, 5]
        gone, alive = psutil.wait_procs(children, timeout=wait_s())
        assert not alive
        assert len(gone) == len(children)


def test_keys_are_asked_for_and_never_written_down(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record, keys = tmp_path / "record.jsonl", tmp_path / "keys"
    keys.write_text("sk-of-the-file\n")
    flags = ("--workers", 1, "--device", "timed", "--record", record, "--api-key-file", keys)
    with serve(
        *(tiny_model, "--port", 0, *flags, "--metrics-compat", "vllm", "--log-level", "debug"),
        LIVESCALE_API_KEY="sk-of-the-environment",
    ) as running:
        url = f"{running.url}/v1/completions"
        assert httpx.post(url, json=body(1), timeout=wait_s()).status_code == 401
        for key in ("sk-of-the-file", "sk-of-the-environment"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(url, json=body(20, False), headers=headers, timeout=wait_s())
            assert answer.status_code == 200
        keys.write_text("sk-of-another-file\n")
        models = f"{running.url}/v1/models"
        wait_for_status(models, "sk-of-another-file", 200)
        wait_for_status(models, "sk-of-the-file", 401)
        metrics = httpx.get(f"{running.url}/metrics", timeout=wait_s()).text
        labels = '{engine="0",model_name="tiny"}'
        assert f"vllm:generation_tokens_total{labels} 40.0" in metrics
        assert f"vllm:num_preemptions_total{labels} 0.0" in metrics
        assert f"vllm:kv_cache_usage_perc{labels}" in metrics
        for child in running.children():
            assert "sk-of" not in " ".join([*child.cmdline(), *child.environ().values()])
        running.process.send_signal(signal.SIGTERM)
        running.wait_until_printed("stopped")
        assert running.process.wait(wait_s()) == 0
    logged = capfd.readouterr().err
    assert "answered with 401" in logged
    written = record.read_text() + "".join(running.printed) + logged
    assert str(keys) in written  # the settings are there
    assert "sk-of" not in written


def wait_for_status(url: str, key: str, status: int) -> None:
    """The key gets this answer, soon."""
    deadline_s = time.monotonic() + wait_s()
    headers = {"Authorization": f"Bearer {key}"}
    while httpx.get(url, headers=headers, timeout=wait_s()).status_code != status:
        assert time.monotonic() < deadline_s


@pytest.mark.long
def test_killing_the_supervisor_leaves_no_process_and_the_next_one_removes_its_directory(
    tiny_model: Path,
) -> None:
    # Sockets have short paths.
    with tempfile.TemporaryDirectory() as temporary:
        flags = (tiny_model, "--port", 0, "--workers", 2, "--device", "timed")
        with serve(*flags, TMPDIR=temporary) as running:
            children = running.children()
            assert running.own_children() == 5  # controller, gateway, one agent, two workers
            [directory] = Path(temporary).glob("livescale-*")
            running.process.kill()
            _, alive = psutil.wait_procs(children, timeout=wait_s())
            assert not alive
        with serve(*flags, TMPDIR=temporary) as first, serve(*flags, TMPDIR=temporary) as second:
            assert not directory.exists()
            assert len(list(Path(temporary).glob("livescale-*"))) == 2
            for running in (first, second):
                running.process.send_signal(signal.SIGTERM)
                running.wait_until_printed("stopped")
        assert not list(Path(temporary).iterdir())


def test_ctrl_c_while_the_pool_is_starting(tiny_model: Path) -> None:
    running = Serve(tiny_model, "--port", 0, "--device", "timed")
    running.wait_until_printed("starting")
    running.process.send_signal(signal.SIGINT)
    running.wait_until_printed("stopped")
    assert running.process.wait(wait_s()) == 0
    running.end()


def test_ctrl_c_does_not_wait_for_workers_that_are_not_there_yet(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A fork server imports and compiles before it answers: this one does so for ever."""
    python = python_without_forks(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = (tiny_model, "--port", 0, "--worker-python", python)
    running = Serve(*words, TMPDIR=str(temporary))
    killer = threading.Timer(wait_s(), running.process.kill)
    killer.start()
    running.wait_until_printed("starting")
    children: list[psutil.Process] = []
    while not any("sleep" in child.cmdline() for child in children):
        children = running.children()
    running.process.send_signal(signal.SIGINT)
    running.wait_until_printed("stopped")
    assert running.process.wait(wait_s()) == 0
    killer.cancel()
    running.end()
    _, alive = psutil.wait_procs(children, timeout=wait_s())
    assert not alive
    assert not list(temporary.iterdir())


def test_a_second_ctrl_c_ends_everything_at_once(tiny_model: Path) -> None:
    words = ("--port", 0, "--workers", 1, "--gateways", 2)
    with serve(tiny_model, *words, *steady()) as running:
        children = running.children()
        first_token = threading.Event()
        ended = threading.Event()

        def stream() -> None:
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream(
                    "POST", f"{running.url}/v1/completions", json=body(LONG), timeout=wait_s()
                ) as response,
            ):
                for _ in response.iter_lines():
                    first_token.set()
            ended.set()

        threading.Thread(target=stream).start()
        assert first_token.wait(wait_s())
        running.process.send_signal(signal.SIGINT)
        running.wait_until_printed("draining")
        running.process.send_signal(signal.SIGINT)
        running.wait_until_printed("stopped")
        assert running.process.wait(wait_s()) == 0
        assert ended.wait(wait_s())
        _, alive = psutil.wait_procs(children, timeout=wait_s())
        assert not alive
