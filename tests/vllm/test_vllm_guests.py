"""Servers of plain vLLM with the plug-in: they load from a pool and from one another, by chain."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from completions import prompt
from installed import REASON, greedy_tokens, vllm_python
from pool_thread import LocalPool

from livescale.messages.commands import StartHolding
from livescale.telemetry.record.record import StepLine, read_record
from livescale.values.chunks import senders
from livescale.values.types import FromWorker, WorkerRef
from livescale.vllm_engine.environment import DEFAULTS, FIXED
from slowness import patient, patient_ms

PYTHON = vllm_python()
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(PYTHON is None, reason=REASON),
    # vLLM alone takes half a minute to import.
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "livescale-vllm"
PROMPTS, TOKENS = 4, 24


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the plug-in leaves for vLLM to find."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "livescale_vllm-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: livescale-vllm\nVersion: 0.1.0\n")
    points = "[vllm.general_plugins]\nlivescale = livescale_vllm:register\n"
    (info / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture(scope="module")
def own_tokens(tiny_model: Path) -> list[list[int]]:
    """What vLLM makes of the prompts when it has loaded the model by itself."""
    prompts = [prompt(number, 60 + number) for number in range(PROMPTS)]
    tokens, _ = greedy_tokens([tiny_model], prompts, TOKENS, ["own"])[str(tiny_model)]["own"]
    return tokens


@pytest.fixture(scope="module")
def pool(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """One worker has the model. What it sends takes ten seconds: loads that begin together
    overlap."""
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("head"),
        "    min_replicas: 1\n    max_replicas: 1\n    prefill_tokens_per_s: 5000\n",
        device="timed",
        workers=1,
        listen="127.0.0.1:0",
        host_memory_bytes=0,
        lost_after_ms=patient_ms(30_000),
        uplink_bytes_per_s=350_000,
        downlink_bytes_per_s=100_000_000,
    ) as local:
        local.wait_ready()
        yield local


class Server:
    """One `guest_server.py`."""

    def __init__(
        self,
        directory: Path,
        site: Path,
        *extras: dict[str, object],
        updates: Sequence[str] | None = None,
    ) -> None:
        assert PYTHON is not None
        paths = [site, PLUGIN, ROOT / "src", Path(__file__).parent]
        environ = {
            **os.environ,
            **DEFAULTS,
            **FIXED,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        self.process = subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("guest_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._answers = len(extras if updates is None else updates)
        wishes = {} if updates is None else {"updates": updates}
        self._tell(json.dumps({**asked(directory), "extras": extras, **wishes}))

    def begin(self) -> None:
        """Load, when vLLM is imported."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "it has ended"
        self._tell("go")

    def found(self) -> list[Any]:
        """Of each of the extras, or updates."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, list) and len(answer) == self._answers:
                    return answer
        raise AssertionError("it has ended")

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=patient(30))
        self.process.kill()
        self.process.wait()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def closing(*servers: Server) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.close()


def asked(directory: Path) -> dict[str, object]:
    prompts = [prompt(number, 60 + number) for number in range(PROMPTS)]
    return {"directory": str(directory), "prompts": prompts, "tokens": TOKENS}


def terms(local: LocalPool, **values: object) -> dict[str, object]:
    own = {
        "pool": local.pool.join_address,
        "token_file": str(local.pool.token_file),
        "model": "tiny",
    }
    return own | values


def feeders(pool: LocalPool) -> dict[WorkerRef, WorkerRef]:
    """Who got everything from whom, of all that joined."""
    lines = (line for line in read_record(pool.record) if isinstance(line, StepLine))
    found = {}
    for command in (command for line in lines for command in line.commands):
        if isinstance(command, StartHolding) and command.holding.member.is_agent:
            (upstream,) = senders(command.feeds)
            assert isinstance(upstream, FromWorker)
            found[command.holding.member] = upstream.worker
    return found


def test_two_servers_at_once_load_by_chain_and_answer_as_vllm_does(
    pool: LocalPool, site: Path, tiny_model: Path, own_tokens: list[list[int]]
) -> None:
    servers = [Server(tiny_model, site, terms(pool)) for _ in range(2)]
    with closing(*servers):
        for server in servers:
            server.begin()
        answers = [server.found() for server in servers]
        sources = feeders(pool)
        assert pool.gauge("agents") == 2, "they stay holders"
    assert answers == [[own_tokens], [own_tokens]]
    first, second = sources
    assert not sources[first].is_agent
    assert sources[second] == first, "a chain"


def test_what_cannot_be_loaded_is_one_sentence(
    pool: LocalPool, site: Path, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    unreachable = {"pool": "127.0.0.1:9", "patience_s": 0.5}
    server = Server(
        other,
        site,
        terms(pool, **unreachable),
        terms(pool, model="giant"),
        terms(pool, colour="red"),
        terms(pool),
    )
    with closing(server):
        server.begin()
        away, unknown, misspelt, another = server.found()
    assert "127.0.0.1:9: Connection refused" in away
    assert "the pool has no model 'giant' in one piece. Available: tiny" in unknown
    assert "model_loader_extra_config: Object contains unknown field `colour`" in misspelt
    assert "model tiny is another one: its hidden_size is 128" in another


def test_an_engine_that_runs_gets_the_parameters_of_a_model_of_the_pool(
    pool: LocalPool, site: Path, tiny_model: Path, own_tokens: list[list[int]]
) -> None:
    server = Server(tiny_model, site, terms(pool), updates=["tiny"] * 2)
    with closing(server):
        server.begin()
        found = server.found()
    assert found == [own_tokens, own_tokens]
