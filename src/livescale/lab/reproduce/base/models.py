"""Models, accelerators and clusters of the papers, as the package brings them along."""

from __future__ import annotations

from livescale.clusters.files import NamedTopology, find_cluster, read_topology
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.latency.work import RunWork
from livescale.values.units import NS_PER_MS


def layers_of(preset: str, tp_size: int = 1) -> tuple[int, ...]:
    """Bytes of each layer of one rank."""
    return PRESETS[preset].spec(tp_size).layer_bytes


def prefill_ms(kind: str, preset: str, tokens: int, tp_size: int = 1) -> float:
    """How long an accelerator takes for one prompt on its own, up to the first token."""
    latency = RooflineLatency.of(kind, PRESETS[preset], tp_size)
    return latency.run_ns(RunWork(((tokens, 0),), sampled=1)) / NS_PER_MS


def cluster_of(name: str) -> NamedTopology:
    """A cluster that comes with the package."""
    return read_topology(find_cluster(name))
