"""The pools that are compared with the simulator: many timed workers, or two that compute.

Their models are made for the run. Every worker is a host of its own, so that parameters cross
links, which are so narrow that a load takes about the time that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from livescale.bench.fidelity_profile import Bare
from livescale.bench.profile import ProfileOptions, run_profile
from livescale.bench.profile_points import ProfileLimits
from livescale.config import PoolConfig
from livescale.config_reading import load_config
from livescale.engine.make import Preset, make_model
from livescale.latency.linear import LinearLatency
from livescale.latency.table import TableLatency
from livescale.profile_files import read_profile

_MODEL = "fidelity"
# Many small layers: their bytes cost the machine little, and phases of a load can be told apart.
_TIMED_SHAPE = Preset(16, 128, 256, 4, 2, 1024)
_RUN_US, _TOKEN_US = 40_000, 400
_DECODES_MAX = 32
_CPU_SHAPE = Preset(6, 256, 704, 8, 2, 2048)


@dataclass(frozen=True, slots=True)
class FidelityPool:
    """A kind of workers, the settings of their pool (but for the record's path), and how long a
    Run takes on such a worker that has the machine to itself."""

    kind: str
    config: PoolConfig
    latency: Bare


def timed_pool(scratch: Path, workers: int, load_s: float) -> FidelityPool:
    """Workers that wait: 40 ms for a Run and 0.4 ms per token, as a large model takes on one
    accelerator. So slow that the machine itself is idle, mostly."""
    latency = LinearLatency(_RUN_US * 1000, _TOKEN_US * 1000)
    settings: dict[str, object] = {
        "device": "timed",
        "timed_run_us": _RUN_US,
        "timed_token_us": _TOKEN_US,
        # Counted, not allocated.
        "kv_bytes": 1 << 30,
        "run_tokens_max": 256,
    }
    config = _config(scratch, _TIMED_SHAPE, workers, load_s, settings)
    return FidelityPool("timed", config, latency)


def cpu_pool(
    scratch: Path, workers: int, load_s: float, profile_s: float, say: Callable[[str], None]
) -> FidelityPool:
    """Workers that compute, one thread each. The engine's Runs are profiled for so many seconds.

    Raises BenchError when that was too short.
    """
    settings: dict[str, object] = {"device": "cpu", "kv_bytes": 64 << 20}
    config = _config(scratch, _CPU_SHAPE, workers, load_s, settings)
    options = ProfileOptions(
        out=scratch / "profile.csv",
        model=scratch / _MODEL,
        seconds=profile_s,
        # Chunks larger than any Run: how a chunk's attention grows with what stands before it is
        # read off whole prompts.
        limits=ProfileLimits(
            _CPU_SHAPE.model_tokens_max // 2, _DECODES_MAX, _CPU_SHAPE.model_tokens_max
        ),
    )
    run_profile(options, say)
    return FidelityPool("cpu", config, TableLatency.measured(read_profile(options.out)))


def _config(
    scratch: Path, shape: Preset, workers: int, load_s: float, settings: dict[str, object]
) -> PoolConfig:
    directory = scratch / _MODEL
    make_model(directory, shape)
    size_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    rate = max(1 << 20, int(size_bytes / load_s))
    file = scratch / "pool.yaml"
    file.write_text(json.dumps({"models": [{"path": str(directory)}]}))  # JSON is YAML
    common: dict[str, object] = {
        "port": 0,
        "workers": workers,
        "hosts": workers,
        # Sources are devices alone: an agent per host would be a process more per worker.
        "host_memory_bytes": 0,
        "arena_bytes": 2 * size_bytes,
        "chunk_bytes": 64 << 10,
        "uplink_bytes_per_s": rate,
        "downlink_bytes_per_s": rate,
        "queue_requests_max": 100_000,
        "queue_prompt_tokens_max": None,
        "record": str(scratch / "record.jsonl"),
    }
    return load_config(file, [], {}, {**common, **settings})
