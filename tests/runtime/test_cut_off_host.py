"""A host that is cut off without a word, in a testbed: no process ends, and no connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pool_thread import LocalPool, wait_until
from running_streams import check, right_tokens_of, streams_while

from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec
from livescale.messages.events import WorkerJoined, WorkerLost
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient_ms

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture(scope="module")
def bed(network_namespaces: None) -> Iterator[Testbed]:
    with Testbed(NetworkSpec(hosts=2, link_bits_per_s=1_000_000_000)) as made:
        yield made


@pytest.mark.long
def test_streams_of_a_host_that_is_cut_off_go_on_elsewhere(
    bed: Testbed, tiny_model: Path, tmp_path: Path
) -> None:
    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 2\n    prefill_tokens_per_s: 5000\n",
        bed,
        device="timed",
        workers=2,
        timed_run_us=20_000,
        lost_after_ms=patient_ms(1000),
    ) as pool:
        wait_until(lambda: pool.gauge("agents") == 2, "every host has an agent")
        right = right_tokens_of(pool)
        process = psutil.Process(pool.pool.pids()["worker 0"])

        async def cut_off() -> None:
            await asyncio.to_thread(bed.isolate, "h0")

        try:
            check(asyncio.run(streams_while(pool, cut_off)), right)
            wait_until(lambda: pool.gauge("workers") == 1, "it is given up")
            assert process.is_running()
        finally:
            bed.rejoin("h0")
        # It comes back as another: the one that was given up is told to end.
        wait_until(lambda: pool.gauge("workers") == pool.gauge("agents") == 2, "both are back")
        wait_until(lambda: pool.gauge("instances") == 2, "and serve")
        wait_until(lambda: not process.is_running(), "the first life has ended")
    steps = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    events = [event for line in steps for event in line.events]
    lost = [event for event in events if isinstance(event, WorkerLost)]
    assert [event.worker.worker for event in lost if not event.worker.is_agent] == [0]
    # Whichever sees it first: heartbeats that do not come, or what TCP waits to be acknowledged.
    reasons = [event.reason for event in lost]
    assert all("silent" in why or "timed out" in why for why in reasons), reasons
    joined = [event.worker for event in events if isinstance(event, WorkerJoined)]
    assert sorted(ref.incarnation for ref in joined if ref.worker == 0) == [0, 1]
