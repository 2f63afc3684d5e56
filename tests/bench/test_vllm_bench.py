"""`bench vllm` without vLLM: its load against a server that answers in odd pieces, its figures, and
what it refuses. With vLLM it runs in `tests/vllm`.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from livescale.lab.bench.base.line_process import bench_process
from livescale.lab.bench.engines.vllm_serving import OURS, PLAIN, ServingFigures, ServingRow
from livescale.main import main
from slowness import patient

TOKENS = 5
#: what a prompt begins with says how it is answered
WHOLE, CUT, REFUSED = 2, 3, 4


class OddServer:
    """Answers completions with token ids that continue the prompt, in pieces of any size."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.port = 0
        self.is_up = threading.Event()
        self.end: Callable[[], object] = lambda: None

    async def serve(self) -> None:
        """Until `end` is called, on another thread."""
        is_over, loop = asyncio.Event(), asyncio.get_running_loop()
        self.end = lambda: loop.call_soon_threadsafe(is_over.set)
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.is_up.set()
        async with server:
            await is_over.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split()[0])
                prompt = json.loads(await reader.readexactly(length))["prompt"]
                for piece in self._pieces(_response(prompt)):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if prompt[0] == CUT:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    def _pieces(self, content: bytes) -> Iterator[bytes]:
        while content:
            size = self._rng.randrange(1, 40)
            yield content[:size]
            content = content[size:]


def _response(prompt: list[int]) -> bytes:
    if prompt[0] == REFUSED:
        return b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
    events = [{"choices": [{"text": "", "token_ids": [prompt[-1] + n]}]} for n in range(TOKENS)]
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    lines.append(b"data: [DONE]\n\n")
    chunks = [b"%x\r\n%s\r\n" % (len(line), line) for line in [*lines, b""]]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    kept = chunks[:2] if prompt[0] == CUT else chunks
    return head + b"".join(kept)


@contextmanager
def odd_server(seed: int) -> Iterator[OddServer]:
    server = OddServer(seed)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert server.is_up.wait(patient(60))
    try:
        yield server
    finally:
        server.end()
        thread.join(patient(60))


@pytest.mark.usefixtures("machine")
def test_answers_are_read_however_they_come_and_what_is_cut_off_is_lost() -> None:
    kinds = [WHOLE, WHOLE, REFUSED, WHOLE, CUT, WHOLE, WHOLE, WHOLE]
    prompts = [[kind, 100 * number] for number, kind in enumerate(kinds)]
    with odd_server(seed=1) as server, bench_process("load", "peers.completion_rounds") as load:
        load.ask({}, patient(60))
        job = {"host": "127.0.0.1", "port": server.port, "model": "m", "patience_s": patient(60)}
        answer = load.ask(
            job | {"in_flight": 3, "output_tokens": TOKENS, "prompts": prompts}, patient(120)
        )
    right = [[100 * n + i for i in range(TOKENS)] for n in range(len(kinds))]
    found = answer["token_ids"]
    for number, kind in enumerate(kinds):
        if kind == WHOLE:
            assert found[number] == right[number]
        else:
            assert len(found[number]) < TOKENS
    assert len(answer["errors"]) == 2
    assert len(answer["ttft_ns"]) == kinds.count(WHOLE) + kinds.count(CUT)


def row(server: str, in_flight: int, rate: float, ttft_ms: float, tokens: list[int]) -> ServingRow:
    return ServingRow(
        server,
        in_flight,
        tokens_per_s=[rate],
        tokens_per_cpu_s=[rate],
        ttft_ns=[int(ttft_ms * 1e6)],
        cores_used=[1.0],
        others_cpu=[0.0],
        token_ids=[tokens],
    )


def test_figures_are_ratios_to_the_plain_server() -> None:
    right = [1, 2, 3, 4]
    rows = (
        row(OURS, 1, 50, 7, right),
        row(PLAIN, 1, 50, 6, right),
        row(OURS, 8, 90, 20, [1, 2, 9, 4]),
        row(PLAIN, 8, 100, 30, right),
    )
    figures = ServingFigures(rows, 8).figures()
    assert figures["throughput_ratio_to_plain"] == 0.9
    assert figures["added_ttft_ms"] == pytest.approx(1)
    assert figures["added_ttft_ms_under_load"] == pytest.approx(-10)
    assert figures["token_mismatches"] == 2
    assert figures["lost"] == 0
    assert "throughput_ratio_to_defaults" not in figures, "it was not run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vllm-python", "x", "--parts", "speed"], "--parts: unknown 'speed', there are serving"),
        (["--vllm-python", "x", "--streams", "1"], "--streams must be at least 2"),
        (["--vllm-python", "x", "--link-gbit", "0"], "--link-gbit must be above 0"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["bench", "vllm", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("machine")
def test_an_interpreter_that_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vllm", "--vllm-python", "/no/python"]) == 1
    assert "--vllm-python /no/python: cannot be run" in capsys.readouterr().err
