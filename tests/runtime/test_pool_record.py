"""The run record of a real pool: a full disk, a second pool, further starts, and parts."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pool_thread import LocalPool, wait_until

from effort import mostly_long
from livescale.common.settings import ConfigError
from livescale.config.reading import load_config
from livescale.main import main
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.history.reading import read_history
from livescale.telemetry.record.record import RequestLine, read_record, starts_of
from livescale.telemetry.record.record_parts import parts_of
from livescale.telemetry.replay import replay
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")


def ask(pool: LocalPool, requests: int = 1, tokens: int = 4, choices: int = 1) -> None:
    """Completions one after the other; all end well. Each choice is a request of the record."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "n": choices}
    body |= {"ignore_eos": True}
    with httpx.Client(timeout=patient(60)) as client:
        for _ in range(requests):
            answer = client.post(f"{pool.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


def answered(record: Path) -> int:
    return sum(isinstance(line, RequestLine) for line in read_record(record))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A record on a file system of 64 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if subprocess.run(made, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems can be mounted by root only")
    try:
        yield mount / "record.jsonl"
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_pool_serves_on_when_its_disk_is_full(
    tiny_model: Path, tmp_path: Path, full_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalPool(tiny_model, tmp_path, device="timed", workers=1, record=str(full_disk)) as pool:
        controller = pool.pool.pids()["controller"]
        assert pool.gauge("record_open") == 1
        asked = 0
        while pool.gauge("record_open") and asked < 400:
            ask(pool, 20)
            asked += 20
        wait_until(lambda: pool.gauge("record_open") == 0, "the record is closed")
        ask(pool, 20)
        assert pool.pool.pids()["controller"] == controller
    said = [line for line in capfd.readouterr().err.splitlines() if "the run record" in line]
    assert len(said) == 1, said
    assert "No space left on device" in said[0]
    assert 0 < answered(full_disk) <= asked
    assert replay(read_record(full_disk)).lives == 1


def test_a_record_on_a_full_device_is_closed_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with LocalPool(tiny_model, tmp_path, device="timed", workers=1, record="/dev/full") as pool:
        wait_until(lambda: pool.gauge("record_open") == 0, "the record is closed")
        ask(pool, 3)


def test_starts_follow_one_another_in_one_record_and_nothing_empties_it(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = LocalPool(tiny_model, tmp_path, device="timed", workers=1)
    record = first.record
    assert record.stat().st_mode & 0o777 == 0o600
    with first as pool:
        ask(pool, 5)
        wait_until(lambda: answered(record) == 5, "the requests are recorded")
        before = record.stat().st_size
        with pytest.raises(ConfigError, match=f"record {record}: is being written by another pool"):
            LocalPool(tiny_model, tmp_path, device="timed", workers=1)
        assert record.stat().st_size >= before
    before = record.stat().st_size
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"port": taken.getsockname()[1], "record": str(record), "device": "timed"}
        with pytest.raises(ConfigError, match="is in use"):
            Pool(load_config(None, [str(tiny_model)], {}, settings))
    assert record.stat().st_size == before
    with LocalPool(tiny_model, tmp_path, device="timed", workers=1) as pool:
        ask(pool, 3)
    starts = starts_of(read_record(record))
    counts = [sum(isinstance(line, RequestLine) for line in start) for start in starts]
    assert counts == [5, 3]
    # Members that end with their pool are not lost.
    assert [read_history(start).losses for start in starts] == [[], []]
    assert replay(read_record(record)).lives == 2
    assert main(["report", str(record)]) == 0
    assert "record, start 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", mostly_long(["parts.jsonl", "parts.jsonl.zst"], ["parts.jsonl"]))
def test_a_record_in_parts_replays_and_each_part_is_reported(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    record = tmp_path / name
    settings = {
        "device": "timed",
        "workers": 1,
        "record": str(record),
        "record_bytes_max": 1 << 16,
    }
    asked = 0
    with LocalPool(tiny_model, tmp_path, **settings) as pool:
        while len(parts_of(record)) < 3 and asked < 4000:
            ask(pool, 2, tokens=40, choices=20)
            asked += 40
        ask(pool, 1)
    assert answered(record) == asked + 1
    assert replay(read_record(record)).lives == 1
    parts = parts_of(record)
    assert len(parts) >= 3
    for _, part in parts[1:]:
        assert main(["report", str(part)]) == 0
        assert "1 -> 1 -> 1 instances" in capsys.readouterr().out
    assert main(["replay", str(parts[1][1])]) == 1
    assert "the name of its first part" in capsys.readouterr().err
