"""`bench wires`: what TLS on wires costs where a thousand streams get their tokens over them.

Two pools of one head and one host that joined, alike but for certificates, get the same load at the
same time, again and again: what else the machine does meets both alike. (In turns the same pool
differed from round to round by up to a third.) Workers are timed, so all CPU time is that of
carrying requests and tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx

from livescale.engine.files.make import PRESETS, make_model
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.made_models import gauge_sum, pool_document
from livescale.lab.bench.hosts.joined_pool import HEAD, JoinedPool, cpu_s
from livescale.lab.bench.pools.gateway_load import (
    PRESET,
    GatewayBenchOptions,
    allow_descriptors,
    timed_pool,
)
from livescale.report.run.terminal import table
from livescale.runtime.join.cluster_folder import ClusterFolder

_MODEL, _HOST = "timed", "host"
_PLAIN, _TLS = "plain", "tls"
_WAIT_S = 120.0
# Descriptors besides one per stream: wires, pipes, files.
_OTHER_DESCRIPTORS = 256


@dataclass(frozen=True, slots=True)
class WiresBenchOptions:
    """In each round all streams of each pool ask `requests` times, one request after the other."""

    streams: int = 1000
    requests: int = 2
    output_tokens: int = 50
    prompt_tokens: int = 64
    workers: int = 4
    step_ms: int = 200
    rounds: int = 8
    ramp_s: float = 1.0


@dataclass(frozen=True, slots=True)
class WiresRound:
    """One load on one pool. `cpu_s` is by kind of process."""

    kind: str
    tokens: int
    elapsed_s: float
    cpu_s: Mapping[str, float]

    @property
    def us_per_token(self) -> float:
        return sum(self.cpu_s.values()) * 1e6 / self.tokens


@dataclass(frozen=True, slots=True)
class WiresReport:
    """Rounds in their order: the n-th of each kind were at one time."""

    options: WiresBenchOptions
    rounds: Sequence[WiresRound]

    def of(self, kind: str) -> list[WiresRound]:
        return [played for played in self.rounds if played.kind == kind]

    def ratios(self) -> list[float]:
        """TLS over plain, CPU seconds per token. Who begins first is a few percent cheaper: each is
        the geometric mean of two rounds, of which one pool began the one and the other the next."""
        pairs = zip(self.of(_TLS), self.of(_PLAIN), strict=True)
        each = [tls.us_per_token / plain.us_per_token for tls, plain in pairs]
        return [sqrt(one * other) for one, other in zip(each[::2], each[1::2], strict=True)]

    def as_json(self) -> dict[str, object]:
        return {
            "streams": self.options.streams,
            "tokens_per_round": self.rounds[0].tokens,
            "cpu_ratio_tls": median(self.ratios()),
            "cpu_ratio_tls_quartiles": _quartiles(self.ratios()),
            "cpu_ratio_tls_all": self.ratios(),
            "cpu_us_per_token": {kind: self._by_process(kind) for kind in (_PLAIN, _TLS)},
            "tokens_per_s": {
                kind: median(played.tokens / played.elapsed_s for played in self.of(kind))
                for kind in (_PLAIN, _TLS)
            },
        }

    def text(self) -> str:
        by_kind = [self._by_process(kind) for kind in (_PLAIN, _TLS)]
        names = list(by_kind[0])
        rows: list[list[object]] = [
            [name, *(f"{found[name]:.2f}" for found in by_kind), _over(by_kind, name)]
            for name in names
        ]
        low, middle, high = _quartiles(self.ratios())
        return "\n".join(
            [
                table(["CPU us per token", "plain", "TLS", "ratio"], rows),
                f"TLS over plain, {len(self.ratios())} times two rounds: median {middle:.3f},"
                f" quartiles {low:.3f} to {high:.3f},"
                f" all {min(self.ratios()):.3f} to {max(self.ratios()):.3f}",
            ]
        )

    def _by_process(self, kind: str) -> dict[str, float]:
        """CPU microseconds per token, of the median round of each kind of process, and of all."""
        rounds = self.of(kind)
        found = {
            name: median(played.cpu_s[name] * 1e6 / played.tokens for played in rounds)
            for name in rounds[0].cpu_s
        }
        return {**found, "all": median(played.us_per_token for played in rounds)}


def run_wires(options: WiresBenchOptions, say: Callable[[str], None]) -> WiresReport:
    """Start both pools, and load them in turns. Raises UserError, also for a request that fails."""
    allow_descriptors(options.streams + _OTHER_DESCRIPTORS)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="livescale-bench-")))
        make_model(scratch / _MODEL, PRESET)
        pools = []
        for kind in (_PLAIN, _TLS):
            pools.append(_LoadedPool(kind, scratch, options, stack))
            say(f"{kind}: ready")
        rounds: list[WiresRound] = []
        for number in range(options.rounds + 1):
            for pool in pools:
                pool.begin(number)
            played = [pool.played() for pool in pools]
            told = [f"{one.kind} {one.us_per_token:.2f}" for one in played]
            words = "" if number else " (does not count)"
            say(f"  CPU us per token: {', '.join(told)}, {played[0].elapsed_s:.1f} s{words}")
            rounds += played if number else []
            pools.reverse()  # none of them is always the first
    return WiresReport(options, tuple(rounds))


# -- helpers, in the order used -------------------------------------------------------------------


def _quartiles(values: Sequence[float]) -> list[float]:
    return quantiles(values, n=4, method="inclusive")


def _over(by_kind: Sequence[Mapping[str, float]], name: str) -> str:
    plain, tls = (found[name] for found in by_kind)
    return f"{tls / plain:.3f}" if plain else ""


class _LoadedPool:
    """A head and a host with all the workers, and who loads them. All end with the stack."""

    def __init__(
        self, kind: str, scratch: Path, options: WiresBenchOptions, stack: ExitStack
    ) -> None:
        self._kind = kind
        self._options = options
        folder = scratch / kind
        folder.mkdir()
        model, settings = timed_pool(
            scratch / _MODEL,
            GatewayBenchOptions(
                streams=options.streams,
                workers=options.workers,
                step_ms=options.step_ms,
                prompt_tokens=options.prompt_tokens,
            ),
        )
        file = folder / "pool.yaml"
        file.write_text(pool_document([model], settings))
        own: dict[str, tuple[str, ...]] = {HEAD: (), _HOST: ()}
        if kind == _TLS:
            cluster = ClusterFolder(folder / "cluster")
            own = {
                HEAD: ("--tls-dir", str(cluster.init())),
                _HOST: ("--tls-dir", str(cluster.add(_HOST))),
            }
        pool = stack.enter_context(JoinedPool(folder))
        pool.begin_head("-c", str(file), *own[HEAD])
        pool.begin_host(_HOST, "--workers", str(options.workers), *own[_HOST])
        self._url = pool.url()
        pool.until(lambda: [] if self._serving() >= options.workers else [_HOST], _WAIT_S)
        # What a pool starts later, such as what renders templates, is not there yet.
        self._processes = pool.processes()
        self._before = cpu_s(self._processes)
        self._load: LineProcess = stack.enter_context(
            bench_process(f"the load of {kind}", "peers.stream_load")
        )
        self._load.ask({}, _WAIT_S)

    def begin(self, seed: int) -> None:
        """A round begins."""
        options, address = self._options, urlsplit(self._url)
        job: dict[str, Any] = {
            **asdict(options),
            "host": address.hostname,
            "port": address.port,
            "model": _MODEL,
            "vocabulary": PRESETS[PRESET].vocab_size,
            "seed": seed,
            "patience_s": _WAIT_S,
        }
        self._before = cpu_s(self._processes)
        self._load.send(job)

    def played(self) -> WiresRound:
        """The round to its end. Raises BenchError where a request failed."""
        seen = self._load.receive(2 * _WAIT_S)
        before, after = self._before, cpu_s(self._processes)
        asked = self._options.streams * self._options.requests
        if seen["errors"] or seen["requests"] < asked:
            told = "; ".join(seen["errors"]) or "no error"
            raise BenchError(f"{self._kind}: {seen['requests']} of {asked} answers: {told}")
        return WiresRound(
            self._kind,
            seen["tokens"],
            seen["elapsed_s"],
            {kind: after[kind] - before[kind] for kind in after},
        )

    def _serving(self) -> float:
        page = httpx.get(f"{self._url}/metrics", trust_env=False).text
        return gauge_sum(
            page, f'livescale_instances{{model="{_MODEL}",role="unified",state="serving"}}'
        )
