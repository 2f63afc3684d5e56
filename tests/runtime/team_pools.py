"""Pools whose instances serve in teams while they load: what their tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from pool_thread import LocalPool, wait_until

from livescale.messages.commands import ChangeDuty
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.routes import Team

SOURCES = 2


@contextmanager
def team_pool(
    model: Path, scratch: Path, workers: int, link_bytes_per_s: int, **flags: object
) -> Iterator[LocalPool]:
    """Two instances serve, each worker has a host of its own, and nothing is loaded ahead or kept.
    Instances that load do nothing alone."""
    settings = {
        "run_tokens_max": 64,
        "sequences_max": 8,
        "live_order": "stop-the-world",
        "warm_spares": "off",
        "spares_ahead": "none",
        "uplink_bytes_per_s": link_bytes_per_s,
        "downlink_bytes_per_s": link_bytes_per_s,
    }
    limits = f"    prefill_tokens_per_s: 2000\n    min_replicas: {SOURCES}\n"
    with LocalPool(
        model, scratch, limits, workers=workers, hosts=workers, **settings, **flags
    ) as pool:
        wait_until(lambda: pool.serving() == SOURCES, "two instances serve")
        yield pool


async def ask_for(pool: LocalPool, client: httpx.AsyncClient, least: int) -> None:
    """So many instances at least, from now on."""
    url = f"{pool.url}/admin/models/tiny"
    changed = await client.patch(url, json={"min_replicas": least})
    assert changed.status_code == 200, changed.text


def words(pool: LocalPool, kind: type) -> list:
    lines = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    return [w for line in lines for w in (*line.events, *line.commands) if isinstance(w, kind)]


def teams(pool: LocalPool) -> list[Team]:
    found = [c.duty.team for c in words(pool, ChangeDuty) if c.duty.team is not None]
    return list({team.number: team for team in found}.values())
