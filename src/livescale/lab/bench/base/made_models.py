"""Random models in the shapes that a benchmark asks for, in fp32 or bf16, and what benchmarks want
of pools that serve made models: settings, where they are, gauges. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from livescale.config.pool import PoolConfig
from livescale.config.reading import load_config
from livescale.config.settings.tuning import Tuning
from livescale.engine.files.make import Preset, make_model
from livescale.gateway.metrics.metrics_page import HELP, PREFIX
from livescale.lab.bench.base.errors import BenchError
from livescale.runtime.supervisor.supervisor import Pool
from livescale.values.types import Manifest

DTYPES = ("float32", "bfloat16")

_POLL_S = 0.1
_HEAD_DIM = 64
_LENGTH_BYTES = 8
_QUERY_HEADS_PER_KV_HEAD = 4


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Sizes that matter for speed; what is None follows from the hidden size."""

    hidden: int
    layers: int
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None

    def __str__(self) -> str:
        return f"{self.hidden}x{self.layers}"

    def preset(self, vocabulary: int) -> Preset:
        """All sizes. Raises BenchError when they do not fit each other."""
        heads = self.heads or max(1, self.hidden // _HEAD_DIM)
        kv_heads_max = max(1, heads // _QUERY_HEADS_PER_KV_HEAD)
        shared_evenly = [n for n in range(1, kv_heads_max + 1) if heads % n == 0]
        kv_heads = self.kv_heads or max(shared_evenly)
        # As wide as Llama's: 8/3 of the hidden size, in whole cache lines.
        intermediate = self.intermediate or -(-self.hidden * 8 // (3 * 64)) * 64
        sizes = (self.hidden, self.layers, heads, kv_heads, intermediate)
        if min(sizes) < 1:
            raise BenchError(f"shape {self}: every size must be at least 1")
        if self.hidden % (2 * heads) or heads % kv_heads:
            raise BenchError(
                f"shape {self}: {heads} heads of even size do not fit hidden {self.hidden},"
                f" or do not share {kv_heads} KV heads"
            )
        return Preset(self.layers, self.hidden, intermediate, heads, kv_heads, vocabulary)


def parse_shape(
    text: str, heads: int | None, kv_heads: int | None, inner: int | None
) -> BenchShape:
    """A shape such as `512x8`: hidden size and decoder layers. Raises BenchError."""
    hidden, _, layers = text.partition("x")
    if not (hidden.isdecimal() and layers.isdecimal()):
        raise BenchError(f"shape {text!r} must be HIDDENxLAYERS, such as 512x8")
    return BenchShape(int(hidden), int(layers), heads, kv_heads, inner)


def make_bench_model(directory: Path, shape: BenchShape, vocabulary: int, dtype: str) -> None:
    """Write a model of this shape. The same weights for every dtype, but for the rounding."""
    assert dtype in DTYPES, dtype
    make_model(directory, shape.preset(vocabulary))
    if dtype == "bfloat16":
        for file in sorted(directory.glob("*.safetensors")):
            _round_to_bfloat16(file)
        config = directory / "config.json"
        fields = json.loads(config.read_text())
        config.write_text(json.dumps({**fields, "dtype": "bfloat16"}, indent=2) + "\n")


@contextlib.contextmanager
def made_model(shape: BenchShape, vocabulary: int, dtype: str) -> Iterator[Path]:
    """A folder with such a model, named after its shape, while the context is entered."""
    with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
        directory = Path(scratch, f"made-{shape}")
        make_bench_model(directory, shape, vocabulary, dtype)
        yield directory


def pool_document(models: Sequence[Mapping[str, object]], settings: Mapping[str, object]) -> str:
    """The configuration file of such a pool, for `serve -c`."""
    tuning = {name: value for name, value in settings.items() if name in Tuning.__struct_fields__}
    own = {name: value for name, value in settings.items() if name not in tuning}
    return json.dumps({"models": models, **own, "tuning": tuning})  # JSON is YAML


def pool_config(
    scratch: Path, models: Sequence[Mapping[str, object]], settings: Mapping[str, object]
) -> PoolConfig:
    """Settings of a pool, with keys of `models:` in its configuration for each model."""
    file = scratch / "pool.yaml"
    file.write_text(pool_document(models, settings))
    return load_config(file, [], {}, {})


def bare_hosts(workers: int, link_bytes_per_s: int) -> dict[str, object]:
    """Settings of a pool in which each worker is a host of its own, so that parameters cross links
    of this rate. No host keeps a copy: who grows has to load. Requests may wait as they like."""
    return {
        "port": 0,
        "workers": workers,
        "hosts": workers,
        "host_memory_bytes": 0,
        "uplink_bytes_per_s": link_bytes_per_s,
        "downlink_bytes_per_s": link_bytes_per_s,
        "warm_spares": "off",
        "queue_requests_max": 100_000,
    }


def vocabulary_of(manifest: Manifest) -> int:
    """Token ids of a made model."""
    size: int = json.loads(manifest.config_json)["vocab_size"]
    return size


def target_of(pool: Pool) -> dict[str, object]:
    """The job of a load generator: the gateway of the pool, and its first model."""
    address, model = urlsplit(pool.base_url), pool.models[0]
    return {
        "host": address.hostname,
        "port": address.port,
        "model": model.spec.name,
        "vocabulary": vocabulary_of(model.manifest),
    }


def gauge_sum(metrics: str, name: str) -> float:
    """The sum of the samples of a gauge or counter on a page of metrics. The name is that of
    samples, with all labels where one series is meant. Without samples the sum is 0: families of
    models are on no page before there is a model. Raises BenchError for a name that no page has."""
    ((wanted,),) = (family.samples for family in text_string_to_metric_families(f"{name} 0"))
    stem = wanted.name.removesuffix("_total")
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    family = families.get(stem)
    if family is None and stem.startswith(PREFIX) and stem.removeprefix(PREFIX) in HELP:
        return 0.0
    names = {"gauge": stem, "counter": f"{stem}_total"}
    if family is None or names.get(family.type) != wanted.name:
        raise BenchError(f"{wanted.name} is not a gauge or counter of a pool (docs/metrics.md)")
    samples = [sample for sample in family.samples if sample.name == wanted.name]
    labels = list(samples[0].labels) if samples else []
    if wanted.labels and samples and list(wanted.labels) != labels:
        raise BenchError(f"{wanted.name} has the labels {labels}, not those of {name}")
    return sum(s.value for s in samples if s.labels.items() >= wanted.labels.items())


async def gauge_comes_to(
    pool: Pool, name: str, is_right: Callable[[float], bool], patience_s: float
) -> bool:
    """Look at a gauge of the pool until its sum is right; whether that came in time."""
    deadline_s = time.monotonic() + patience_s
    async with httpx.AsyncClient(trust_env=False, base_url=pool.base_url) as client:
        while time.monotonic() < deadline_s:
            if is_right(gauge_sum((await client.get("/metrics")).text, name)):
                return True
            await asyncio.sleep(_POLL_S)
    return False


def _round_to_bfloat16(file: Path) -> None:
    """Rewrite a safetensors file of fp32 tensors: a length, a JSON header, then the bytes."""
    content = file.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", content)
    start = _LENGTH_BYTES + header_bytes
    header = json.loads(content[_LENGTH_BYTES:start])
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32", f"{file}: {name} is {entry['dtype']}"
            entry["dtype"] = "BF16"
            entry["data_offsets"] = [offset // 2 for offset in entry["data_offsets"]]
    bits = np.frombuffer(content, np.uint32, offset=start)
    # To nearest, ties to even: what is cut off may carry into what is kept.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the format wants the data aligned
    file.write_bytes(struct.pack("<Q", len(text)) + text + rounded.tobytes())
