"""One soak: a pool, its load, its faults, and at the end every token checked.

What the processes of the pool hold (memory and descriptors) is looked at over the requests served.
Processes die and are replaced in a soak, so growth is taken within lives: one slope per kind of
process, each life with an intercept of its own.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression

import httpx
import psutil

from livescale.config.pool import PoolConfig
from livescale.engine.files.make import make_model
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import gauge_sum, pool_config, vocabulary_of
from livescale.lab.bench.base.token_checks import wrong_greedy_tokens, wrong_timed_tokens
from livescale.lab.bench.soak.faults import (
    FAULT_KINDS,
    FaultScene,
    strike,
)
from livescale.lab.bench.soak.load import LoadShape, SoakLoad
from livescale.lab.bench.soak.report import SoakReport, fault_line
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec, TestbedError, goodput_bytes_per_s
from livescale.runtime.layout.pool_layout import layout_of
from livescale.runtime.supervisor.supervisor import Pool, PoolFailed

_PRESET = "tiny"
_MODELS = ("soaked", "quiet")
_HOSTS = 3
# About a second for the model: long enough that faults fall into loads.
_LINK_BITS_PER_S = 25_000_000
_RECORD_DISK_BYTES = 256 << 20
_LOOK_S = 2.0
_REST_S = 60.0
_POLL_S = 0.1
_UNFINISHED = ("livescale_num_requests_running", "livescale_num_requests_waiting")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What is run. `rate` is in requests per second; `faults` are kinds, `fault_every_s` the mean
    time between the end of one and the next."""

    requests: int = 7200
    seed: int = 0
    rate: float = 6.0
    device: str = "cpu"
    faults: tuple[str, ...] = tuple(FAULT_KINDS)
    fault_every_s: float = 8.0
    lost_after_ms: int | None = None


def run_soak(options: SoakOptions, say: Callable[[str], None]) -> SoakReport:
    """Soak a pool. Raises BenchError when it cannot start or does not live to the end."""
    with tempfile.TemporaryDirectory(prefix="livescale-soak-") as name, _network() as bed:
        scratch = Path(name)
        make_model(scratch / _MODELS[0], _PRESET)
        with _record_disk(scratch / "record") as disk:
            try:
                return asyncio.run(_soak(options, scratch, bed, disk, say))
            except PoolFailed as error:
                raise BenchError(f"the pool did not live to the end: {error}") from error


# -- helpers, in the order used -------------------------------------------------------------------


@contextmanager
def _network() -> Iterator[Testbed | None]:
    """Hosts as network namespaces; None where they cannot be made (root, iproute2)."""
    with ExitStack() as stack:
        bed = None
        with suppress(TestbedError):
            spec = NetworkSpec(hosts=_HOSTS, link_bits_per_s=_LINK_BITS_PER_S)
            bed = stack.enter_context(Testbed(spec))
        yield bed


@contextmanager
def _record_disk(directory: Path) -> Iterator[Path | None]:
    """A small file system for the record; None where none can be mounted (root)."""
    directory.mkdir()
    size = f"size={_RECORD_DISK_BYTES}"
    words = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)]
    is_there = False
    with suppress(FileNotFoundError):
        is_there = subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield directory if is_there else None
    finally:
        if is_there:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def _soak(
    options: SoakOptions,
    scratch: Path,
    bed: Testbed | None,
    disk: Path | None,
    say: Callable[[str], None],
) -> SoakReport:
    config = _config(options, scratch, has_links=bed is not None)
    layout = None if bed is None else layout_of(bed.topology(), config, bed)
    pool = Pool(config, layout=layout)
    manifest = pool.models[0].manifest
    vocabulary = vocabulary_of(manifest)
    shape = LoadShape(options.requests, options.seed, options.rate, _MODELS, vocabulary)
    say(f"starting {pool.layout} …")
    async with pool, httpx.AsyncClient(base_url=pool.base_url, trust_env=False) as client:
        await pool.ready()
        scene = FaultScene(
            pool=pool,
            load=SoakLoad(pool.base_url, shape),
            client=client,
            model=scratch / _MODELS[0],
            scratch=scratch,
            rng=random.Random(f"faults:{options.seed}"),
            bed=bed,
            record_disk=disk,
        )
        soak = _Soak(options, scene, say)
        await pool.or_failure(soak.play())
        await scene.load.close()
    outputs = [(scene.load.prompt_ids(prompt), ids) for prompt, ids in scene.load.outputs]
    if options.device == "timed":
        wrong = wrong_timed_tokens(manifest, outputs)
    else:
        wrong = wrong_greedy_tokens(scratch / _MODELS[0], outputs)
    return soak.report(wrong)


def _config(options: SoakOptions, scratch: Path, *, has_links: bool) -> PoolConfig:
    """Small enough that bursts need all workers and a load takes a second."""
    rate = goodput_bytes_per_s(_LINK_BITS_PER_S)
    path = str(scratch / _MODELS[0])
    limits = {"path": path, "prefill_tokens_per_s": 1000}
    models = [limits, {**limits, "name": _MODELS[1], "min_replicas": 0, "idle_s": 5}]
    settings: dict[str, object] = {
        "port": 0,
        "device": options.device,
        "workers": _HOSTS,
        "arena_bytes": 8 << 20,
        "kv_bytes": 8 << 20,
        "sequences_max": 16,
        "stall_ms": 500,
        # Faults come so often that a request may meet several.
        "request_attempts_max": 10,
        "record": str(scratch / "record" / "soak.jsonl"),
    }
    if options.device == "timed":
        settings |= {"timed_run_us": 5000, "timed_token_us": 20}
    if not has_links:
        settings |= {"uplink_bytes_per_s": rate, "downlink_bytes_per_s": rate}
    if options.lost_after_ms is not None:
        settings["lost_after_ms"] = options.lost_after_ms
    return pool_config(scratch, models, settings)


class _Soak:
    """The load, the faults and the looks at memory, side by side."""

    def __init__(self, options: SoakOptions, scene: FaultScene, say: Callable[[str], None]) -> None:
        self._options = options
        self._scene = scene
        self._say = say
        self._kinds = tuple(kind for kind in options.faults if kind in scene.kinds())
        self._watch = HeldWatch()
        self._report = SoakReport(
            requests=scene.load.requests,
            left_out=tuple(k for k in options.faults if k not in self._kinds),
        )

    async def play(self) -> None:
        """Until all requests have ended and nothing runs any more."""
        began = time.monotonic()
        load = asyncio.create_task(self._scene.load.run())
        others = [asyncio.create_task(work) for work in (self._strike_on(load), self._look_on())]
        try:
            await load
            await others[0]
            self._report.elapsed_s = time.monotonic() - began
            self._report.left_over = await self._unfinished()
        finally:
            for task in (load, *others):
                task.cancel()

    async def _strike_on(self, load: asyncio.Task[None]) -> None:
        """One fault after the other for as long as there is load. First each kind once."""
        rng = self._scene.rng
        waiting = list(self._kinds)
        rng.shuffle(waiting)
        while self._kinds:
            pause_s = rng.uniform(0.5, 1.5) * self._options.fault_every_s
            await asyncio.wait({load}, timeout=pause_s)
            if load.done():
                return
            kind = waiting.pop() if waiting else rng.choice(self._kinds)
            fault = await strike(self._scene, kind)
            self._report.faults.append(fault)
            self._say(fault_line(len(self._scene.load.requests), fault))

    async def _look_on(self) -> None:
        while True:
            load = self._scene.load
            self._watch.look(self._scene.pool.pids(), load.ended)
            await asyncio.sleep(_LOOK_S)

    async def _unfinished(self) -> int:
        """Requests that the pool still counts when all clients have gone."""
        for _ in range(int(_REST_S / _POLL_S)):
            text = (await self._scene.client.get("/metrics")).text
            left = sum(gauge_sum(text, name) for name in _UNFINISHED)
            if not left:
                break
            await asyncio.sleep(_POLL_S)
        return int(left)

    def report(self, wrong: Sequence[int]) -> SoakReport:
        """`wrong`: tokens of each distinct output that are wrong."""
        report, load = self._report, self._scene.load
        times = load.outputs.values()
        report.broken = load.broken
        report.tokens = sum(len(ids) * n for (_, ids), n in load.outputs.items())
        report.token_mismatches = sum(count * n for count, n in zip(wrong, times, strict=True))
        report.rss_growth = _growth(self._watch.rss_bytes)
        report.descriptor_growth = _growth(self._watch.descriptors)
        return report


# What a process allocates at its first requests is not growth.
_WARM_REQUESTS = 100
# A slope over fewer requests says nothing.
_LIFE_REQUESTS_MIN = 50


# By kind of process: (pid, requests of the load so far, what the process held).
_Looks = dict[str, list[tuple[int, int, int]]]


class HeldWatch:
    """Looks at every process of the pool now and then."""

    def __init__(self) -> None:
        self.rss_bytes: _Looks = {}
        self.descriptors: _Looks = {}
        #: requests served when a process was seen first, by pid
        self._born: dict[int, int] = {}

    def look(self, pids: dict[str, int], requests: int) -> None:
        """Take down what each of these processes holds; those that just died are left out."""
        for name, pid in pids.items():
            born = self._born.setdefault(pid, requests)
            if requests - born < _WARM_REQUESTS:
                continue
            try:
                process = psutil.Process(pid)
                rss, descriptors = process.memory_info().rss, process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            kind = name.split(" ")[0]
            self.rss_bytes.setdefault(kind, []).append((pid, requests, rss))
            self.descriptors.setdefault(kind, []).append((pid, requests, descriptors))


def _growth(looks: _Looks) -> dict[str, float]:
    """Per 1,000 requests, by kind of process; kinds that lived too shortly are absent."""
    slopes = {kind: slope_within(rows) for kind, rows in sorted(looks.items())}
    return {kind: 1000 * slope for kind, slope in slopes.items() if slope is not None}


def slope_within(rows: Iterable[tuple[int, int, int]]) -> float | None:
    """The common slope of y over x, from (life, x, y), with an intercept for each life (least
    squares). None where no life is long enough."""
    lives: dict[int, list[tuple[int, int]]] = {}
    for life, x, y in rows:
        lives.setdefault(life, []).append((x, y))
    from_means: list[tuple[float, float]] = []
    for points in lives.values():
        xs, ys = zip(*points, strict=True)
        if max(xs) - min(xs) >= _LIFE_REQUESTS_MIN:
            from_means += [(x - fmean(xs), y - fmean(ys)) for x, y in points]
    if not from_means:
        return None
    return linear_regression(*zip(*from_means, strict=True), proportional=True).slope
