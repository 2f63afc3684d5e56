"""Every family with prefill and decode on their own instances: its KV travels, its tokens are
right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from family_bursts import burst, check_answers, entries_of, make_families
from pool_thread import LocalPool

from livescale.engine.files.make import FAMILY_NAMES
from livescale.messages.events import BatchTaken
from livescale.telemetry.record.record import StepLine, read_record

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.long]
ROLES = (
    "    prefill_tokens_per_s: 1000\n"
    "    roles:\n"
    "      prefill: {min_replicas: 0, max_replicas: 1}\n"
    "      decode: {min_replicas: 0, max_replicas: 1}\n"
)
TRIES = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_families(tmp_path_factory.mktemp("role-families"))


@pytest.fixture(scope="module")
def pool(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """Two workers: one model at a time has both roles."""
    with LocalPool(
        next(iter(models.values())),
        tmp_path_factory.mktemp("pool"),
        entries_of(models, ROLES),
        workers=2,
        run_tokens_max=64,
        sequences_max=8,
    ) as local:
        yield local


def handovers(pool: LocalPool) -> int:
    lines = (line for line in read_record(pool.record) if isinstance(line, StepLine))
    return sum(isinstance(event, BatchTaken) for line in lines for event in line.events)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_burst_is_answered_right(pool: LocalPool, models: dict[str, Path], family: str) -> None:
    """Over some bursts: one may be answered before the decode instance has its layers."""
    before = handovers(pool)
    for _ in range(TRIES):
        check_answers(pool.url, models[family], burst(pool.url, family))
        if handovers(pool) > before:
            return
    raise AssertionError("no request decodes elsewhere")
