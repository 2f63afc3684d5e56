"""A loading instance of vLLM takes requests before its last layer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from installed import REASON, vllm_python
from pool_thread import LocalPool, wait_until

from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import Dispatch, StartHolding
from livescale.messages.events import HoldingCompleted, LayerArrived
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient

PYTHON = vllm_python()
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(PYTHON is None, reason=REASON),
    # vLLM alone takes half a minute to import.
    pytest.mark.timeout(900),
]
STREAMS, TOKENS = 6, 16
#: of 3.4 MB: the load takes seconds
STORAGE_BYTES_PER_S = 1 << 20
Item = StartHolding | Dispatch | LayerArrived | HoldingCompleted


def story(pool: LocalPool) -> Iterator[Item]:
    """What was ordered and what came of it, in order."""
    for line in read_record(pool.record):
        if isinstance(line, StepLine):
            for item in (*line.events, *line.commands):
                if isinstance(item, Item):
                    yield item


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_the_request_that_wakes_a_model_waits_inside_a_step(
    tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 0\n    max_replicas: 1\n",
        device="vllm",
        worker_python=PYTHON,
        workers=1,
        block_tokens=32,
        kv_bytes="32MiB",
        vllm_engines_max=1,
        weights_layout=layout,
        host_memory_bytes=0,
        spares_ahead="none",
        warm_spares="off",
        live_over_ms=0,
        storage_bytes_per_s=STORAGE_BYTES_PER_S,
        scale_down_timeout_ms=600_000,
    ) as pool:
        wait_until(lambda: pool.gauge("workers") == 1, "the worker is there", patient(100))
        asked = [Answer(prompt(number, 60 + number)) for number in range(STREAMS)]

        async def burst() -> None:
            async with httpx.AsyncClient(timeout=patient(100)) as client:
                await asyncio.gather(*(a.read(pool.url, client, TOKENS) for a in asked))

        asyncio.run(burst())
        check(GreedyOracle(tiny_model), asked, TOKENS)
    items = list(story(pool))
    (order,) = [item for item in items if isinstance(item, StartHolding)]
    assert order.duty is not None
    assert order.duty.live_order == "overlap"
    kinds = [type(item) for item in items]
    early = items[kinds.index(Dispatch) : kinds.index(HoldingCompleted)]
    assert sum(isinstance(item, LayerArrived) for item in early) > 1, "most came later"
