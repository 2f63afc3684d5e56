"""A pool whose workers run vLLM: it scales, answers as vLLM does, and loses nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from completions import Answer, check, prompt
from installed import REASON, greedy_tokens, vllm_python
from pool_thread import LocalPool, wait_until
from running_streams import PROMPTS, STREAMS, TOKENS, RightTokens, nothing, streams_while

from livescale.engine.files.make import make_model
from livescale.engine.oracle import GreedyOracle
from livescale.messages.commands import StartHolding
from livescale.messages.events import HoldingCompleted, WorkerJoined, WorkerLost
from livescale.telemetry.record.record import AnyLine, StepLine, read_record
from livescale.telemetry.replay import replay
from livescale.values.chunks import senders
from livescale.values.types import FromWorker, WorkerRef
from slowness import patient, patient_ms

PYTHON = vllm_python()
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(PYTHON is None, reason=REASON),
    # vLLM alone takes half a minute to import.
    pytest.mark.timeout(900),
]
#: about 3.4 MB: a load takes more than a second, in which something can happen
LINK_BYTES_PER_S = 2_000_000
WORKERS = 3
#: an instance as slow as this is not enough for the streams, nor are two
SCALED = f"    min_replicas: 1\n    max_replicas: {WORKERS}\n    prefill_tokens_per_s: 50\n"
AT_ZERO = """\
  - path: {}
    name: {}
    min_replicas: 0
    max_replicas: 1
    idle_s: 1
    prefill_tokens_per_s: 100
"""
OTHERS = ("first", "second")
FAULT_FILES = Path(__file__).with_name("plugins")
COMEBACK_S = 100.0


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of the same shape with other parameters."""
    root = tmp_path_factory.mktemp("others")
    for number, name in enumerate(OTHERS):
        make_model(root / name, "tiny", seed=1 + number)
    return [root / name for name in OTHERS]


@pytest.fixture(scope="module")
def own_tokens(tiny_model: Path, others: list[Path]) -> dict[Path, RightTokens]:
    """What vLLM makes of the prompts when it has loaded each model by itself."""
    found = greedy_tokens([tiny_model, *others], PROMPTS, TOKENS, ["own"])
    return {
        path: dict(zip(map(tuple, PROMPTS), found[str(path)]["own"][0], strict=True))
        for path in (tiny_model, *others)
    }


@pytest.fixture(scope="module")
def right_tokens(own_tokens: dict[Path, RightTokens], tiny_model: Path) -> RightTokens:
    return own_tokens[tiny_model]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which files ask for faults: vLLM has a plug-in for that meanwhile."""
    root = tmp_path_factory.mktemp("plugin")
    about = root / "vllm_faults-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_faults\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.logits_processors]\nfaults = vllm_faults:Faults\n"
    )
    folder = root / "asked"
    folder.mkdir()
    path = os.pathsep.join(
        [str(root), str(FAULT_FILES), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("FAULT_FOLDER", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pool(
    own_tokens: dict[Path, RightTokens],
    faults: Path,
    tiny_model: Path,
    others: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LocalPool]:
    with LocalPool(
        tiny_model,
        tmp_path_factory.mktemp("pool"),
        SCALED + "".join(AT_ZERO.format(path, path.name) for path in others),
        device="vllm",
        worker_python=PYTHON,
        workers=WORKERS,
        block_tokens=32,
        kv_bytes="16MiB",
        vllm_engines_max=1,
        carrier="tcp",
        uplink_bytes_per_s=LINK_BYTES_PER_S,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        host_memory_bytes="16MiB",
        spares_ahead="none",
        warm_spares="off",
        scale_down_timeout_ms=1000,
        # Of a step: what stays in it longer hangs.
        stuck_after_ms=patient_ms(5000),
    ) as local:
        yield local


@pytest.fixture
def whole(pool: LocalPool) -> LocalPool:
    """The pool, when all of its workers are there, and one instance is."""
    return when(pool, WORKERS)


@pytest.fixture
def enough(pool: LocalPool) -> LocalPool:
    """The pool, when it has a worker more than it needs. The next lives of others begin beside what
    is tested: they take half a minute each."""
    return when(pool, 2)


def when(pool: LocalPool, workers: int) -> LocalPool:
    wait_until(lambda: pool.gauge("workers") >= workers, "workers are there", patient(COMEBACK_S))
    wait_until(lambda: pool.serving() == 1, "there is one instance", patient(COMEBACK_S))
    return pool


class GrowingRecord:
    """The steps of a record that is written. Only what is new is read: a test that looks for a
    moment must not be late for it."""

    def __init__(self, path: Path) -> None:
        self.steps: list[StepLine] = []
        self._path = path
        self._read_bytes = 0
        self._decoder = msgspec.json.Decoder(AnyLine)

    def read_on(self) -> list[StepLine]:
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            piece = file.read()
        whole = piece[: piece.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        lines = map(self._decoder.decode, whole.splitlines())
        self.steps += [line for line in lines if isinstance(line, StepLine)]
        return self.steps


@cache
def growing(path: Path) -> GrowingRecord:
    return GrowingRecord(path)


def steps(pool: LocalPool) -> list[StepLine]:
    return growing(pool.record).read_on()


def orders(pool: LocalPool, model: str = "tiny") -> list[StartHolding]:
    """To workers, the earliest first."""
    found = [c for line in steps(pool) for c in line.commands if isinstance(c, StartHolding)]
    return [order for order in found if order.duty is not None and order.model == model]


def losses(pool: LocalPool) -> list[WorkerRef]:
    return [e.worker for line in steps(pool) for e in line.events if isinstance(e, WorkerLost)]


def joined(pool: LocalPool) -> int:
    """How often a controller met a worker."""
    return sum(isinstance(e, WorkerJoined) for line in steps(pool) for e in line.events)


def completed(pool: LocalPool) -> list[WorkerRef]:
    found = [e for line in steps(pool) for e in line.events if isinstance(e, HoldingCompleted)]
    return [event.holding.member for event in found]


def tokens_while(pool: LocalPool, happens: Callable[[], object]) -> RightTokens:
    """What the streams got, of which all had begun when this happened (on a thread)."""

    async def meanwhile() -> None:
        await asyncio.to_thread(happens)

    answers = asyncio.run(streams_while(pool, meanwhile))
    assert [answer.error for answer in answers] == [None] * STREAMS
    return {tuple(answer.prompt_ids): answer.token_ids for answer in answers}


# -- scaling --------------------------------------------------------------------------------------


def test_a_burst_takes_it_from_one_instance_to_three_and_back(
    whole: LocalPool, right_tokens: RightTokens, tiny_model: Path
) -> None:
    answers = asyncio.run(streams_while(whole, nothing))
    assert {tuple(a.prompt_ids): a.token_ids for a in answers} == right_tokens
    check(GreedyOracle(tiny_model), answers, TOKENS)
    wait_until(lambda: len(completed(whole)) >= WORKERS, "all three had it")
    first, *later = orders(whole)
    assert {order.holding.member.worker for order in later} == (
        set(range(WORKERS)) - {first.holding.member.worker}
    )
    feeds = [sender for order in later for sender in senders(order.feeds)]
    assert all(isinstance(sender, FromWorker) for sender in feeds), "not from storage"
    wait_until(lambda: whole.serving() == 1, "there is one instance again")


def test_models_at_zero_wake_on_one_worker_in_turns(
    whole: LocalPool, own_tokens: dict[Path, RightTokens], others: list[Path]
) -> None:
    for path in [*others, *others]:
        prompt_ids = PROMPTS[0]
        body = {"model": path.name, "prompt": prompt_ids, "max_tokens": 20, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{whole.url}/v1/completions", json=body | more, timeout=patient(60))
        (choice,) = answer.json()["choices"]
        assert choice["token_ids"] == own_tokens[path][tuple(prompt_ids)][:20]
        wait_until(lambda: whole.gauge("instances") == 1, "it is at zero again")
    places = [[order.holding.member for order in orders(whole, name)] for name in OTHERS]
    assert places[0] == places[1], "one worker had both"
    assert [len(members) for members in places] == [2, 2]


# -- what vLLM must not do ------------------------------------------------------------------------


def test_nothing_of_vllm_listens_to_other_machines(whole: LocalPool) -> None:
    for name, pid in whole.pool.pids().items():
        found = psutil.Process(pid).net_connections("inet")
        listening = [its.laddr.ip for its in found if its.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}, name


def test_a_client_that_leaves_frees_its_kv(whole: LocalPool) -> None:
    async def leave() -> None:
        answer = Answer(prompt(50, 100))
        async with httpx.AsyncClient(timeout=patient(100)) as client:
            async for count in answer.stream(whole.url, client, 300):
                if count == 3:
                    return

    asyncio.run(leave())
    wait_until(lambda: whole.kv_in_use() == 0, "the KV is free again")


def test_an_embedding_is_refused_by_name(whole: LocalPool) -> None:
    body = {"model": "tiny", "input": [[5, 6, 7]]}
    refused = httpx.post(f"{whole.url}/v1/embeddings", json=body, timeout=patient(60))
    assert refused.status_code >= 400
    assert "embeddings: the engine of this model gives none" in refused.text


# -- deaths ---------------------------------------------------------------------------------------


def test_the_controller_dies_in_the_middle_of_streams(
    enough: LocalPool, right_tokens: RightTokens
) -> None:
    old, before = enough.pool.pids(), joined(enough)
    assert tokens_while(enough, lambda: enough.kill("controller")) == right_tokens
    # What was known before is still shown until the next one has met them.
    wait_until(lambda: joined(enough) == before + WORKERS, "the next one has met all workers")
    lives = enough.pool.pids()
    assert lives == old | {"controller": lives["controller"]}, "nothing else was lost"


def test_the_target_dies_in_the_middle_of_its_load(
    enough: LocalPool, right_tokens: RightTokens
) -> None:
    before, ended = len(orders(enough)), len(completed(enough))
    targets: list[WorkerRef] = []

    def kill() -> None:
        wait_until(lambda: len(orders(enough)) > before, "a load is ordered")
        targets.append(orders(enough)[before].holding.member)
        assert targets[0] not in completed(enough)[ended:], "it has not ended"
        enough.kill(f"worker {targets[0].worker}")

    assert tokens_while(enough, kill) == right_tokens
    wait_until(lambda: targets[0] in losses(enough), "the loss is on record")
    assert targets[0] not in completed(enough)[ended:]


def test_the_source_dies_in_the_middle_of_its_streams(
    enough: LocalPool, right_tokens: RightTokens
) -> None:
    before = len(orders(enough))
    sources: list[WorkerRef] = []
    # While the host's copy is not made again, instances get theirs from an instance.
    enough.kill("agent 0")
    wait_until(lambda: enough.gauge("host_copies") == 0, "its copies are gone")

    def kill() -> None:
        wait_until(lambda: len(orders(enough)) > before, "a load is ordered")
        sender, *_ = senders(orders(enough)[before].feeds)
        assert isinstance(sender, FromWorker)
        assert not sender.worker.is_agent
        sources.append(sender.worker)
        enough.kill(f"worker {sources[0].worker}")

    assert tokens_while(enough, kill) == right_tokens
    wait_until(lambda: sources[0] in losses(enough), "the loss is on record")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("assertion", "exit status 1: AssertionError: a tensor of this step is not as it must be"),
        ("memory", "exit status 1: RuntimeError: "),
        ("hang", "is silent for"),
        ("hang-with-lock", "is silent for"),
    ],
)
def test_a_worker_that_fails_inside_vllm_is_lost_with_its_words(
    enough: LocalPool,
    right_tokens: RightTokens,
    faults: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    words: str,
) -> None:
    before = len(losses(enough))
    assert tokens_while(enough, (faults / fault).touch) == right_tokens
    assert not (faults / fault).exists(), "it was struck"
    wait_until(lambda: len(losses(enough)) == before + 1, "one worker is lost")
    lost = f"worker {losses(enough)[-1].worker}"
    wait_until(partial(is_logged, caplog, lost, words), "its words are in the log")
    assert "hang" in fault or not is_logged(caplog, lost, "is silent"), "it ended at once"


def is_logged(caplog: pytest.LogCaptureFixture, *words: str) -> bool:
    lines = [record.getMessage() for record in caplog.records]
    return any(all(word in line for word in words) for line in lines)


def test_the_record_of_all_that_replays(pool: LocalPool) -> None:
    assert replay(read_record(pool.record)).lives == 2
