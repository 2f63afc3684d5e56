"""From the order of a load to the first token of a kept engine, in a pool that goes to zero.

One worker; the parameters come from the host's memory over TCP. Each request finds no instance and
wakes one, which goes when the request has ended. Times are those of the pool's record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import gauge_comes_to, make_bench_model, pool_config
from livescale.lab.bench.engines.engine_report import spread
from livescale.lab.bench.engines.load_bench import shape_of_size
from livescale.lab.bench.engines.vllm_options import (
    LOADED_SHAPE,
    LOADED_VOCABULARY,
    VllmBenchOptions,
    vllm_settings,
)
from livescale.runtime.supervisor.supervisor import Pool
from livescale.telemetry.record.record import ScaleLine, read_record

_MODEL = "bench"
_LAYOUTS = ("auto", "plain")
_KV_BYTES = 64 << 20
_PROMPT_TOKENS = 16
_ANSWER_S = 300.0
_LINK_LOADS = 3
_LINK_VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """One that counts: from the decision to its first byte, to the last one, to the first token."""

    first_byte_ns: int
    loaded_ns: int
    first_token_ns: int


@dataclass(frozen=True, slots=True)
class PoolLoads:
    """The loads of one pool, and what its link takes for the bytes (None: it has no limit)."""

    layout: str
    model_bytes: int
    loads: tuple[TimedLoad, ...]
    link_s: float | None = None

    @property
    def first_token_s(self) -> float:
        return median(load.first_token_ns for load in self.loads) / 1e9

    def as_json(self) -> dict[str, object]:
        times = [load.first_token_ns / 1e9 for load in self.loads]
        found: dict[str, object] = {
            "weights_layout": self.layout,
            "model_bytes": self.model_bytes,
            "loads": len(self.loads),
            "order_to_first_byte_s": median(load.first_byte_ns for load in self.loads) / 1e9,
            "order_to_loaded_s": median(load.loaded_ns for load in self.loads) / 1e9,
            "order_to_first_token_s": spread(times),
        }
        if self.link_s is not None:
            found |= {"link_s": self.link_s, "beyond_link_s": self.first_token_s - self.link_s}
        return found

    def text(self) -> str:
        beyond = ""
        if self.link_s is not None:
            beyond = f", {self.first_token_s - self.link_s:.3f} s beyond the link's"
        return (
            f"{self.model_bytes / 1e6:.0f} MB, weights_layout {self.layout}: order to first token"
            f" {self.first_token_s:.3f} s{beyond} (median of {len(self.loads)})"
        )


@dataclass(frozen=True, slots=True)
class VllmLoads:
    """A row for each layout. `prefix` of the figures' names."""

    rows: tuple[PoolLoads, ...]
    prefix: str = ""

    def figures(self) -> dict[str, object]:
        """Of the layout that is the default."""
        first = self.rows[0]
        found: dict[str, object] = {f"{self.prefix}order_to_first_token_s": first.first_token_s}
        if first.link_s is not None:
            found[f"{self.prefix}beyond_link_s"] = first.first_token_s - first.link_s
        return found

    def details(self) -> object:
        return [row.as_json() for row in self.rows]

    def text(self) -> str:
        return "\n".join(row.text() for row in self.rows)


def measure_loads(
    options: VllmBenchOptions, scratch: Path, say: Callable[[str], None]
) -> VllmLoads:
    """21 MB over TCP, without a limit. Raises BenchError."""
    make_bench_model(scratch / _MODEL, LOADED_SHAPE, LOADED_VOCABULARY, "float32")
    rows = []
    for layout in _LAYOUTS:
        rows.append(_row(options, scratch, layout, options.loads))
        say(f"  {rows[-1].text()}")
    return VllmLoads(tuple(rows))


def measure_link_load(
    options: VllmBenchOptions, scratch: Path, say: Callable[[str], None]
) -> VllmLoads:
    """A large model over a link that data planes keep to a rate, at both ends. Raises
    BenchError."""
    shape = shape_of_size(options.link_size_bytes)
    make_bench_model(scratch / _MODEL, shape, _LINK_VOCABULARY, "bfloat16")
    rows = []
    for layout in _LAYOUTS:
        rate = options.link_bytes_per_s
        rows.append(_row(options, scratch, layout, _LINK_LOADS, link_bytes_per_s=rate))
        say(f"  {rows[-1].text()}")
    return VllmLoads(tuple(rows), "link_")


# -- helpers, in the order used -------------------------------------------------------------------


def _row(
    options: VllmBenchOptions,
    scratch: Path,
    layout: str,
    loads: int,
    link_bytes_per_s: int | None = None,
) -> PoolLoads:
    record = scratch / f"{layout}.jsonl"
    size_bytes = sum(file.stat().st_size for file in (scratch / _MODEL).glob("*.safetensors"))
    settings = vllm_settings(options) | {
        "record": str(record),
        "weights_layout": layout,
        "arena_bytes": size_bytes + size_bytes // 8,
        "kv_bytes": _KV_BYTES,
        "host_memory_bytes": size_bytes + size_bytes // 4,
        "carrier": "tcp",
        "uplink_bytes_per_s": link_bytes_per_s,
        "downlink_bytes_per_s": link_bytes_per_s,
    }
    model = {"path": str(scratch / _MODEL), "name": _MODEL, "min_replicas": 0, "idle_s": 0}
    pool = Pool(pool_config(scratch, [model], settings))
    asyncio.run(_play(pool, loads + 1))
    manifest_bytes = pool.models[0].manifest.size_bytes
    link_s = None if link_bytes_per_s is None else manifest_bytes / link_bytes_per_s
    # The first one connects, and measures what an instance prefills.
    return PoolLoads(layout, manifest_bytes, tuple(_read(record)[1:]), link_s)


async def _play(pool: Pool, loads: int) -> None:
    body = {"model": _MODEL, "prompt": [*range(2, 2 + _PROMPT_TOKENS)], "max_tokens": 1}
    async with pool, httpx.AsyncClient(base_url=pool.base_url, trust_env=False) as client:
        await pool.ready()
        for _ in range(loads):
            post = client.post("/v1/completions", json=body, timeout=_ANSWER_S)
            answer = await pool.or_failure(post)
            if answer.is_error:
                raise BenchError(f"a load gave no token: {answer.text}")
            if not await pool.or_failure(
                gauge_comes_to(pool, "livescale_instances", lambda n: n == 0, _ANSWER_S)
            ):
                raise BenchError(f"the instance did not go within {_ANSWER_S:.0f} s")


def _read(record: Path) -> list[TimedLoad]:
    """Of a record that has ended. Raises BenchError where a load failed."""
    found = []
    for line in read_record(record):
        if not isinstance(line, ScaleLine) or not line.loads:
            continue
        (phases,) = line.loads
        times = (phases.first_byte_ns, phases.loaded_ns, phases.first_token_ns)
        if None in times:
            raise BenchError(f"a load did not come to its first token: {phases.failed or phases}")
        found.append(TimedLoad(*(at_ns - line.decided_ns for at_ns in times if at_ns is not None)))
    return found
