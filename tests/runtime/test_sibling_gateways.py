"""What gateways behind one port know of one another, and what stays of one that has died."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from livescale.gateway.contract.backend import Reading
from livescale.gateway.metrics.kept_counts import KeptCounts, SiblingCounts
from livescale.gateway.metrics.metrics import Metrics
from livescale.runtime.gateway_process import sibling_gateways
from livescale.runtime.gateway_process.sibling_gateways import SiblingGateways
from livescale.runtime.wire.boot import GatewayPlace

pytestmark = pytest.mark.usefixtures("machine")

NOTHING = KeptCounts()


def counted(tokens: int, running: int = 0) -> KeptCounts:
    metrics = Metrics(["m"])
    meter = metrics.meter("m", prompt_tokens=1, arrived_s=0.0)
    for token in range(tokens):
        meter.token(float(token))
    kept = tuple(counts.kept() for counts in metrics.models.values())
    reading = Reading("num_requests_running", running, (("model", "m"),), is_own=True)
    return KeptCounts(kept, (reading,))


def made(directory: Path, number: int, counts: KeptCounts = NOTHING) -> SiblingGateways:
    gateway = SiblingGateways(GatewayPlace(str(directory), number, 2))
    gateway.answer_with(lambda: counts)
    return gateway


def asked(gateway: SiblingGateways) -> SiblingCounts:
    [other] = asyncio.run(others(gateway))
    return other


async def others(gateway: SiblingGateways) -> list[SiblingCounts]:
    return list(await gateway.others(NOTHING))


def test_one_that_answers_tells_what_it_has_now(tmp_path: Path) -> None:
    async def ask() -> None:
        counts = [counted(1, running=3)]
        other = SiblingGateways(GatewayPlace(str(tmp_path), 1, 2))
        other.answer_with(lambda: counts[-1])
        await other.open()
        for tokens in (5, 9):
            counts.append(counted(tokens, running=2))
            assert await others(made(tmp_path, 0)) == [SiblingCounts("1", counts[-1], True)]
        await other.close()

    asyncio.run(ask())


def test_one_that_was_never_there_has_counted_nothing(tmp_path: Path) -> None:
    assert asked(made(tmp_path, 0)) == SiblingCounts("1", NOTHING, False)


def test_one_that_is_gone_has_counted_what_was_shown_and_runs_nothing(tmp_path: Path) -> None:
    asyncio.run(made(tmp_path, 1, counted(7, running=4)).close())
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "gateway-1"))
    counts = KeptCounts(counted(7).models)
    assert asked(made(tmp_path, 0)) == SiblingCounts("1", counts, False)
    assert made(tmp_path, 1).earlier() == counted(7, running=4)


def test_what_one_shows_of_itself_is_kept(tmp_path: Path) -> None:
    """Or its successor would begin with less than a page has had."""
    asyncio.run(made(tmp_path, 0).others(counted(6)))
    assert made(tmp_path, 0).earlier() == counted(6)


def test_the_last_counts_of_one_that_ends_in_order_are_kept(tmp_path: Path) -> None:
    asyncio.run(made(tmp_path, 0, counted(8)).close())
    assert made(tmp_path, 0).earlier() == counted(8)


def test_one_that_is_silent_is_shown_as_it_was_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_gateways, "_ANSWER_S", 0.05)

    async def ask() -> None:
        await made(tmp_path, 1, counted(7, running=4)).close()
        is_over = asyncio.Event()

        async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await is_over.wait()
            writer.close()

        async with await asyncio.start_unix_server(say_nothing, tmp_path / "gateway-1"):
            [other] = await others(made(tmp_path, 0))
            is_over.set()
        assert other == SiblingCounts("1", counted(7, running=4), False)

    asyncio.run(ask())


def test_a_file_that_is_broken_counts_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gateway-1.counts").write_bytes(b"\xc1nonsense")
    assert asked(made(tmp_path, 0)) == SiblingCounts("1", NOTHING, False)
    assert "gateway 1: its saved counters are unreadable" in caplog.text


def test_one_that_cannot_write_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        other = made(tmp_path, 1, counted(7))
        await other.open()
        (tmp_path / "gateway-1.new").mkdir()
        assert await others(made(tmp_path, 0)) == [SiblingCounts("1", NOTHING, False)]
        await other.close()

    asyncio.run(ask())
    assert "Metrics of this gateway are unavailable" in caplog.text
