"""Every family in one pool whose instances help while they load: whatever changes hands on the way,
every token that a client reads is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from family_bursts import burst, check_answers, entries_of, make_families
from pool_thread import LocalPool, wait_until

from livescale.engine.files.make import FAMILY_NAMES
from livescale.messages.commands import StartHolding
from livescale.messages.events import BatchTaken, LiveStarted, RequestEnded
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.types import Outcome

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.long]
#: a load takes half a second
LINK_BYTES_PER_S = 2_000_000
SETTINGS = "    prefill_tokens_per_s: 1000\n    min_replicas: 0\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_families(tmp_path_factory.mktemp("live-families"))


@pytest.fixture(scope="module")
def pool(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(
        next(iter(models.values())),
        tmp_path_factory.mktemp("pool"),
        entries_of(models, SETTINGS),
        workers=2,
        hosts=2,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        prefill_queue_upper_ms=100,
        prefill_queue_lower_ms=50,
        run_tokens_max=64,
        sequences_max=8,
        dispatched_ahead_max=2,
        live_over_ms=0,
        live_pairs="always",
    ) as local:
        # Else the last copy of a model would be in the way of the next one.
        copies = len(models)
        wait_until(lambda: local.gauge("host_copies") == copies, "all are in host memory")
        yield local


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_burst_is_answered_right(pool: LocalPool, models: dict[str, Path], family: str) -> None:
    check_answers(pool.url, models[family], burst(pool.url, family))


def test_what_changed_hands_ended_once(pool: LocalPool) -> None:
    wait_until(lambda: pool.gauge("num_requests_running") == 0, "nothing is left")
    lines = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    words = [word for line in lines for word in line.events]
    orders = [word for line in lines for word in line.commands if isinstance(word, StartHolding)]
    duties = {order.holding: order.duty for order in orders}
    live = {duties[word.holding].instance for word in words if isinstance(word, LiveStarted)}
    taken = [word for word in words if isinstance(word, BatchTaken)]
    print(f"{len(live)} instances helped, {len(taken)} batches were taken over")
    assert {batch.target for batch in taken} <= live
    ended = [word for word in words if isinstance(word, RequestEnded)]
    assert {word.outcome for word in ended} <= {
        *(Outcome.FINISHED, Outcome.CANCELLED, Outcome.RETURNED)
    }
