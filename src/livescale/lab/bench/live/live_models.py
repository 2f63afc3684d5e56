"""What `bench live` runs: made models of equal decoder layers, and how fast two workers are.

Loading a layer takes `ratio` times as long as computing it for one batch. For workers that wait the
latency is made to fit; for those that compute, the tokens of a batch are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from livescale.engine.files.make import PRESETS, Preset, make_model
from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.lab.bench.base.errors import BenchError
from livescale.latency.work import LinearLatency
from livescale.values.types import SEQUENCES_MAX, Manifest
from livescale.values.units import NS_PER_S

LINK_BYTES_PER_S_MAX = 37_500_000
"""300 Mbit/s: what a link carries at most."""

_NO_LATENCY = LinearLatency(0, 0)
_MODEL = "live"
_TIMED_TOKENS, _TIMED_RUN_NS = 256, 8_000_000
# What a layer of the demo's model takes for 256 tokens on one CPU.
_LINKED_LAYER_NS = 10_000_000
# Thin rows and little KV beside the layers' bytes, as with large models: 4 % here.
_TIMED_SHAPE = Preset(16, 64, 1856, 2, 1, 512)
_CPU_SHAPE = Preset(16, 384, 1024, 6, 1, 512)
_DECODES_MAX = 16
#: positions that a request takes besides its prompt
_SPARE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PairSetting:
    """Source and target: what they are, what they run, and the rate of each one's link.

    A batch is one prompt of `batch_tokens`. Either has `sequences_max` places, KV room for
    `batches_max` batches, and for `_DECODES_MAX` requests that decode beside them.
    """

    kind: str
    directory: Path
    manifest: Manifest
    link_bytes_per_s: int
    batch_tokens: int
    sequences_max: int = 32
    batches_max: int = 16
    latency: LinearLatency = _NO_LATENCY

    @property
    def decoder_layers(self) -> int:
        return len(self.manifest.layers) - 2

    @property
    def run_tokens_max(self) -> int:
        """One prompt in a Run, beside the decodes."""
        return self.batch_tokens + _DECODES_MAX

    @property
    def layer_load_ns(self) -> int:
        """Time of a decoder layer on the link."""
        return self.manifest.layers[1].size_bytes * NS_PER_S // self.link_bytes_per_s

    @property
    def load_ns(self) -> int:
        """Time of the whole model on the link."""
        return self.manifest.size_bytes * NS_PER_S // self.link_bytes_per_s

    @property
    def first_layers_ns(self) -> int:
        """Time of the embedding and the first decoder layer on the link."""
        size_bytes = sum(entry.size_bytes for entry in self.manifest.layers[:2])
        return size_bytes * NS_PER_S // self.link_bytes_per_s

    @property
    def kv_bytes(self) -> int:
        """Of a pool that holds everything that may be there."""
        tokens = self.batches_max * (self.batch_tokens + 128)
        tokens += _DECODES_MAX * _SPARE_TOKENS
        return tokens * model_spec(self.manifest).kv_bytes_per_token


def make_live_model(scratch: Path, kind: str, layers: int) -> tuple[Path, Manifest]:
    """A model for workers of this kind."""
    preset = replace(_TIMED_SHAPE if kind == "timed" else _CPU_SHAPE, decoder_layers=layers)
    directory = scratch / f"{_MODEL}-{kind}"
    make_model(directory, preset)
    return directory, read_manifest(directory, _MODEL)


def timed_setting(directory: Path, manifest: Manifest, ratio: int, layer_ns: int) -> PairSetting:
    """Workers that wait `layer_ns` for a layer of a batch, on a link that fits the ratio.

    Raises BenchError when that link would have to be faster than LINK_BYTES_PER_S_MAX.
    """
    layers = len(manifest.layers) - 2
    rate = manifest.layers[1].size_bytes * NS_PER_S // (ratio * layer_ns)
    if rate > LINK_BYTES_PER_S_MAX:
        raise BenchError(
            f"a layer of {manifest.layers[1].size_bytes} bytes in {ratio} x {layer_ns / 1e6:g} ms"
            f" needs more than {LINK_BYTES_PER_S_MAX} bytes per second"
        )
    per_token_ns = (layers * layer_ns - _TIMED_RUN_NS) // _TIMED_TOKENS
    return PairSetting(
        kind="timed",
        directory=directory,
        manifest=manifest,
        link_bytes_per_s=rate,
        batch_tokens=_TIMED_TOKENS,
        latency=LinearLatency(_TIMED_RUN_NS, per_token_ns),
    )


def linked_setting(scratch: Path, kind: str, link_bytes_per_s: int, tokens: int) -> PairSetting:
    """The demo's model and prompts of `tokens` on a link of this rate: rows and KV weigh there."""
    directory = scratch / f"linked-{kind}"
    make_model(directory, PRESETS["medium"])
    manifest = read_manifest(directory, _MODEL)
    layers_ns = (len(manifest.layers) - 2) * _LINKED_LAYER_NS - _TIMED_RUN_NS
    return PairSetting(
        kind=kind,
        directory=directory,
        manifest=manifest,
        link_bytes_per_s=link_bytes_per_s,
        batch_tokens=tokens,
        sequences_max=SEQUENCES_MAX,
        batches_max=SEQUENCES_MAX,
        latency=LinearLatency(_TIMED_RUN_NS, layers_ns // _TIMED_TOKENS),
    )


def cpu_setting(
    directory: Path, manifest: Manifest, ratio: int, measured: Sequence[tuple[int, int]]
) -> PairSetting:
    """Workers that compute, on the fastest link, with a batch that fits the ratio.

    `measured` are two (tokens, ns of one layer); between and beyond them the time of a layer is
    taken as a·n + b·n², as products of matrices and attention grow.
    """
    link = LINK_BYTES_PER_S_MAX
    wanted_ns = manifest.layers[1].size_bytes * NS_PER_S // (ratio * link)
    tokens = _tokens_of(wanted_ns, measured)
    tokens_max = model_spec(manifest).model_tokens_max - _SPARE_TOKENS // 2
    if not 1 <= tokens <= tokens_max:
        raise BenchError(
            f"ratio {ratio} needs batches of {tokens} tokens, at most {tokens_max} fit"
        )
    return PairSetting("cpu", directory, manifest, link, tokens)


def _tokens_of(wanted_ns: int, measured: Sequence[tuple[int, int]]) -> int:
    (n1, t1), (n2, t2) = measured
    square = (t2 / n2 - t1 / n1) / (n2 - n1)
    linear = t1 / n1 - square * n1
    if square <= 0:
        return round(wanted_ns / (t2 / n2))
    return round((math.sqrt(linear * linear + 4 * square * wanted_ns) - linear) / (2 * square))
