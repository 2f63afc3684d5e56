"""Pools that are played once and looked at by several tests.

Small clusters with rates that make times plain: a model of 16.06 GB takes 1.28 s at 100 Gbit/s.
"""

from __future__ import annotations

import functools
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

from livescale.clusters.files import NamedTopology, read_topology
from livescale.load.traces import TraceRow
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import find_system
from livescale.telemetry.record.record import AnyLine, LoadPhases, ScaleLine, read_record

S = 1_000_000_000
MS = 1_000_000
MODEL = PooledModel("m", "llama-3-8b")
CLUSTER = """
hosts:
  - name: "host{n}"
    count: 2
    memory: 200GB
    nic: 100Gbit
    device_link: 128Gbit
    storage: 10Gbit
    price: 10.5
    devices:
      - {count: 2, kind: a100, memory: 80GB, nic: 100Gbit}
"""


@functools.cache
def cluster(text: str = CLUSTER) -> NamedTopology:
    """The cluster that such a file describes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text)
        return read_topology(path)


def burst(at_ns: int, seconds: int = 4) -> list[TraceRow]:
    """30 requests of 2,000 tokens a second: more than four times what one device prefills."""
    return [TraceRow(at_ns + n * S // 30, 2_000, 8) for n in range(30 * seconds)]


@dataclass(frozen=True)
class Played:
    run: PoolRun
    lines: list[AnyLine]

    @property
    def grown(self) -> list[ScaleLine]:
        """Scale-ups after the load began."""
        return [
            line
            for line in self.lines
            if isinstance(line, ScaleLine)
            and line.to_instances > line.from_instances
            and line.decided_ns >= self.run.started_ns
        ]

    @property
    def loads(self) -> list[tuple[ScaleLine, LoadPhases]]:
        return [(line, load) for line in self.grown for load in line.loads]

    def upstreams(self, from_ns: int = 0, to_ns: int = 1 << 62) -> list[str]:
        """Of loads that were decided in that time of the load."""
        start_ns = self.run.started_ns
        return [
            load.upstream
            for line, load in self.loads
            if from_ns <= line.decided_ns - start_ns < to_ns
        ]


@functools.cache
def play(system: str, bursts: tuple[int, ...] = (1 * S,)) -> Played:
    config = build_config(cluster(), (MODEL,), find_system(system))
    rows = [row for at_ns in bursts for row in burst(at_ns)]
    record = io.BytesIO()
    run = run_pool(config, {"m": rows}, lead_ns(config), 0, record)
    with tempfile.NamedTemporaryFile() as file:
        file.write(record.getvalue())
        file.flush()
        return Played(run, list(read_record(Path(file.name))))


def loaded_after_ns(line: ScaleLine, load: LoadPhases) -> int:
    assert load.loaded_ns is not None
    return load.loaded_ns - line.planned_ns


def made(kind: str = "a100", memory: str = "80GB", count: int = 2) -> NamedTopology:
    """Two hosts of such devices."""
    return cluster(
        f"""
hosts:
  - name: "host{{n}}"
    count: 2
    memory: 200GB
    devices:
      - {{count: {count}, kind: {kind}, memory: {memory}}}
"""
    )
