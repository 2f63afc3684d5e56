"""One model on LiveScale's engine and on vLLM's, behind one gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest
from completions import Answer, check, prompt
from installed import REASON, vllm_python
from joiners import Machine
from pool_thread import LocalPool, wait_until

from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import Dispatch
from livescale.messages.events import WorkerJoined
from livescale.telemetry.record.record import StepLine, read_record
from slowness import patient

PYTHON = vllm_python()
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(PYTHON is None, reason=REASON),
    pytest.mark.timeout(900),
]
STREAMS, TOKENS = 16, 48


def test_a_machine_with_vllm_joins_and_all_greedy_tokens_are_right(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The joined one gets the parameters from the worker of the other kind."""
    token = tmp_path / "token"
    with LocalPool(
        tiny_model,
        tmp_path,
        "    min_replicas: 2\n    max_replicas: 2\n",
        workers=1,
        block_tokens=32,
        kv_bytes="32MiB",
        carrier="tcp",
        host_memory_bytes=0,
        listen="127.0.0.1:0",
        token_file=str(token),
    ) as pool:
        own = ("--device", "vllm", "--worker-python", str(PYTHON))
        words = ("join", pool.pool.join_address, "--token-file", str(token), *own)
        machine = Machine("other", tmp_path, words)
        try:
            wait_until(lambda: pool.serving() == 2, "both serve", patient(100))
            asked = [Answer(prompt(number, 60 + number)) for number in range(STREAMS)]

            async def burst() -> None:
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(timeout=patient(100), limits=limits) as client:
                    await asyncio.gather(*(one.read(pool.url, client, TOKENS) for one in asked))

            asyncio.run(burst())
        finally:
            machine.process.terminate()
            machine.ended()
        check(GreedyOracle(tiny_model), asked, TOKENS)
    lines = [line for line in read_record(pool.record) if isinstance(line, StepLine)]
    joined = [e for line in lines for e in line.events if isinstance(e, WorkerJoined)]
    assert [(e.device.kind, e.is_engine) for e in joined] == [("cpu", False), ("vllm", True)]
    orders = (c for line in lines for c in line.commands if isinstance(c, Dispatch))
    assert len(Counter(order.worker for order in orders)) == 2, "both had requests"
