"""Processes of a whole pool that cannot start: before it was ready, and while it serves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from livescale.runtime.supervisor.supervisor import PoolFailed
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
WAIT_S = 120.0


def test_a_worker_that_cannot_start_again_does_not_end_a_pool_that_serves(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The directory of the sockets is not there for a while: no new process can start."""
    with (
        tempfile.TemporaryDirectory(prefix="ls-") as scratch,  # a socket's path is a short one
        monkeypatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", scratch)
        _lose_the_sockets_for_a_while(Path(scratch), tiny_model, tmp_path, caplog)


def _lose_the_sockets_for_a_while(
    scratch: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalPool(model, tmp_path, device="timed", workers=2) as pool:
        (sockets,) = scratch.glob("livescale-*")
        sockets.rename(tmp_path / "elsewhere")
        pool.kill("worker 0")

        def deaths() -> int:
            return sum(record.message.startswith("worker 0 ") for record in caplog.records)

        # More often than a pool that has never served would bear.
        wait_until(lambda: deaths() > 4, "it dies again and again", WAIT_S)
        body = {"model": "tiny", "prompt": [11, 12, 13], "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{pool.url}/v1/completions", json=body, timeout=patient(WAIT_S))
        assert answer.status_code == 200, answer.text
        assert "worker 0 died before it was ready" in caplog.text
        assert "No such file" in caplog.text, "with the reason"
        (tmp_path / "elsewhere").rename(sockets)
        wait_until(lambda: pool.gauge("workers") == 2, "it is back", WAIT_S)


@pytest.mark.long
def test_a_start_without_the_device_ends_at_the_first_death_and_says_why(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there may be a GPU")
    pool = LocalPool(tiny_model, tmp_path, device="cuda", workers=1)
    with pytest.raises(PoolFailed, match="no GPU"), pool:
        raise AssertionError("it is ready")
    assert not [r for r in caplog.records if "started again" in r.message]
