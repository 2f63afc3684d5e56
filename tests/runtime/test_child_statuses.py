"""What a child's status lines lead to, and what happens to those that are none, or not heeded."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from livescale.runtime.children.pool_process import Child
from livescale.runtime.wire.boot import Status
from livescale.runtime.wire.news import News

LINES = [
    msgspec.json.encode(status) + b"\n"
    for status in (Status(news=(News("first"),)), Status(is_ready=True), Status(fatal="why"))
]


def watched(lines: list[bytes], heed: Any) -> Child:
    """A child whose process has written these lines, and ended."""

    async def watch() -> Child:
        stdout = asyncio.StreamReader()
        for line in lines:
            stdout.feed_data(line)
        stdout.feed_eof()

        async def wait() -> int:
            return 1

        child = Child("worker 7", "worker", lambda _: None, heed=heed)  # type: ignore[arg-type, return-value]
        child.process = SimpleNamespace(stdout=stdout, stdin=None, returncode=1, wait=wait)  # type: ignore[assignment]
        await child.watch()
        return child

    return asyncio.run(watch())


@pytest.mark.parametrize("error", [ValueError, KeyError, msgspec.ValidationError, OSError])
def test_an_error_in_who_heeds_a_status_is_in_the_log_and_the_next_ones_are_heeded(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Status] = []

    def heed(status: Status) -> None:
        heard.append(status)
        if status.news:
            raise error("of the owner")

    child = watched(LINES, heed)
    assert [status.fatal for status in heard] == [None, None, "why"]
    assert (child.restarts.fatal, child.restarts.failed_starts) == ("why", 0)
    [told] = [row for row in caplog.records if row.levelno == logging.ERROR]
    assert told.getMessage() == "a status of worker 7 is lost (news)"
    assert told.exc_info is not None
    assert "of the owner" in str(told.exc_info[1])


@pytest.mark.parametrize("line", [b"Loading 100%\n", b"[]\n", b'{"is_ready":3}\n', b"\xff\n"])
def test_a_line_that_is_no_status_is_in_the_log_and_the_next_ones_are_heeded(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Status] = []
    watched([line, *LINES], heard.append)
    assert len(heard) == len(LINES)
    [told] = caplog.messages
    assert told.startswith("worker 7 wrote a line that is not a status (")


def test_a_long_line_that_is_no_status_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    watched([b"x" * 50_000 + b"\n"], lambda _: None)
    assert len(caplog.messages[0]) < 500
