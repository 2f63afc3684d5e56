"""Leases in a file and in Kubernetes: one holder at a time, over real processes and a real API."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from livescale.common.settings import ConfigError
from livescale.control.cluster.lease import LeaseClaim, LeaseRecord, LeaseTerms
from livescale.runtime.lease.lease_keeper import LeaseKeeper
from livescale.runtime.lease.lease_stores import FileLease, KubernetesLease, LeaseStore, lease_store
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")


def terms(milliseconds: int = 300) -> LeaseTerms:
    """A function: how slow the machine is was not measured when this module was imported."""
    return LeaseTerms(patient_ms(milliseconds) * 1_000_000)


def slow_terms() -> LeaseTerms:
    return terms(1500)


# Prints its epoch when it has the lease, "lost" when it is lost.
_CANDIDATE = """
import asyncio, sys
from pathlib import Path
from livescale.control.cluster.lease import LeaseClaim, LeaseTerms
from livescale.runtime.lease.lease_keeper import LeaseKeeper
from livescale.runtime.lease.lease_stores import FileLease

async def main():
    claim = LeaseClaim(sys.argv[2], LeaseTerms(int(sys.argv[3])))
    keeper = LeaseKeeper(claim, FileLease(Path(sys.argv[1])))
    await keeper.acquired()
    print(keeper.epoch, flush=True)
    await keeper.lost()
    print("lost", flush=True)

asyncio.run(main())
"""


def candidate(file: Path, name: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _CANDIDATE, str(file), name, str(terms().term_ns)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": _path()}
    )


def _path() -> str:
    return os.pathsep.join(sys.path)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_waits_takes_over_from_one_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    first = candidate(file, "first")
    second = None
    try:
        assert line_of(first) == "1"
        second = candidate(file, "second")
        first.kill()
        assert line_of(second) == "2"
        assert json.loads(file.read_text())["record"] == {"holder": "second", "epoch": 2}
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()


def test_a_process_that_was_stopped_knows_that_it_lost_the_lease(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    first, second = candidate(file, "first"), None
    try:
        assert line_of(first) == "1"
        first.send_signal(signal.SIGSTOP)
        second = candidate(file, "second")
        assert line_of(second) == "2"
        first.send_signal(signal.SIGCONT)
        assert line_of(first) == "lost"
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()


def test_a_file_is_replaced_only_by_who_saw_its_last_version(tmp_path: Path) -> None:
    one, other = FileLease(tmp_path / "lease"), FileLease(tmp_path / "lease")
    assert one.read() == (None, "")
    version = one.write(LeaseRecord("one", 1), "")
    assert version is not None
    assert other.write(LeaseRecord("other", 1), "") is None
    assert other.read() == (LeaseRecord("one", 1), version)
    assert other.write(LeaseRecord("other", 2), version) is not None
    assert one.write(LeaseRecord("one", 1), version) is None
    assert (tmp_path / "lease").stat().st_mode & 0o077 == 0


def test_of_two_threads_one_replaces_a_version(tmp_path: Path) -> None:
    """A renewal may still be written when the lease is given back."""
    store, version = FileLease(tmp_path / "lease"), ""
    with ThreadPoolExecutor(2) as threads:
        for number in range(50):
            both = threading.Barrier(2)

            def write(holder: str, seen: str, epoch: int, both: threading.Barrier) -> str | None:
                both.wait()
                return store.write(LeaseRecord(holder, epoch), seen)

            asked = [threads.submit(write, name, version, number, both) for name in ("a", "")]
            [version] = [v for v in (one.result(patient(20)) for one in asked) if v is not None]
    assert store.read()[1] == version


@pytest.mark.parametrize(
    ("text", "words"),
    [("hello", "not a valid lease file"), ('{"kind": "x"}', "not a valid lease file")],
)
def test_another_file_is_no_lease(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "lease"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        FileLease(file)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("lease", "words"),
    [
        ("/nowhere/at/all", "No such file"),
        ("kubernetes:", "Write kubernetes:NAME"),
        ("kubernetes:a/B", "Write kubernetes:NAME"),
        ("kubernetes:pool", "needs a Kubernetes pod with a service account"),
    ],
)
def test_wrong_settings_are_named(lease: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=words):
        lease_store(lease, terms())


# -- Kubernetes -----------------------------------------------------------------------------------


class ApiServer(http.server.BaseHTTPRequestHandler):
    """So much of an API server as leases need: versions, conflicts and tokens."""

    lease: dict[str, Any] | None = None
    version = 0
    tokens = ("token-1",)
    lock = threading.Lock()

    def do_GET(self) -> None:
        with self.lock:
            self._answer(200 if self.lease else 404, self.lease or {"kind": "Status"})

    def do_POST(self) -> None:
        self._store(lambda _: ApiServer.lease is None)

    def do_PUT(self) -> None:
        self._store(lambda body: body["metadata"]["resourceVersion"] == str(ApiServer.version))

    def _store(self, may: Any) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            if not may(body):
                self._answer(409, {"kind": "Status"})
                return
            ApiServer.version += 1
            body["metadata"]["resourceVersion"] = str(ApiServer.version)
            ApiServer.lease = body
            self._answer(200, body)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        is_known = self.headers["Authorization"] in [f"Bearer {token}" for token in self.tokens]
        is_here = self.path.startswith("/apis/coordination.k8s.io/v1/namespaces/pools/leases")
        raw = json.dumps(body if is_known and is_here else {}).encode()
        self.send_response(status if is_known and is_here else 401)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    ApiServer.lease, ApiServer.version, ApiServer.tokens = None, 0, ("token-1",)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "namespace").write_text("pools\n")
    (tmp_path / "token").write_text("token-1\n")
    return tmp_path


def test_a_lease_of_kubernetes_has_one_holder_after_the_other(api: str, account: Path) -> None:
    def keeper(name: str) -> LeaseKeeper:
        store: LeaseStore = KubernetesLease("pool", "", slow_terms(), account=account, base_url=api)
        return LeaseKeeper(LeaseClaim(name, slow_terms()), store)

    async def story() -> None:
        first, second = keeper("first"), keeper("second")
        await first.acquired()
        waiting = asyncio.create_task(second.acquired())
        keeping = asyncio.create_task(first.lost())
        await asyncio.wait({waiting}, timeout=1.2 * slow_terms().term_ns / 1e9)
        assert not waiting.done(), "it is renewed"
        assert (first.holds(), first.epoch, second.holder) == (True, 1, "first")
        keeping.cancel()
        await waiting
        assert (first.holds(), second.holds(), second.epoch) == (False, True, 2)

    asyncio.run(story())
    assert ApiServer.lease is not None
    assert ApiServer.lease["spec"]["holderIdentity"] == "second"
    assert ApiServer.lease["spec"]["leaseTransitions"] == 2


def test_the_token_of_the_account_is_read_anew(api: str, account: Path) -> None:
    store = KubernetesLease("pool", "pools", slow_terms(), account=account, base_url=api)
    version = store.write(LeaseRecord("a", 1), "")
    ApiServer.tokens = ("token-2",)
    with pytest.raises(OSError, match="401"):
        store.read()
    (account / "token").write_text("token-2")
    assert store.read() == (LeaseRecord("a", 1), version)
    assert store.write(LeaseRecord("b", 2), "99") is None


def test_a_store_that_cannot_be_reached_ends_the_term(tmp_path: Path, account: Path) -> None:
    """A holder acts to the end of its term, and no longer."""
    store = FileLease(tmp_path / "lease")
    keeper = LeaseKeeper(LeaseClaim("a", terms()), store)

    async def story() -> str:
        await keeper.acquired()
        (tmp_path / "lease").write_text("broken")
        return await keeper.lost()

    assert "not a valid lease file" in asyncio.run(story())
