"""Small worlds for examples, without chance; the random ones are the swarm's."""

from __future__ import annotations

from livescale.control.state.config import ControllerConfig
from livescale.latency.work import LinearLatency
from livescale.load.traces import TraceRow as Row
from livescale.sim.base.config import FaultConfig, SimConfig
from livescale.sim.swarm.seeds import draw_world as make_world
from livescale.sim.swarm.worlds import MIB, make_device, make_model
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.units import NS_PER_MS as MS

__all__ = ["MIB", "MS", "Row", "make_config", "make_device", "make_model", "make_world"]


def make_config(
    models: tuple[ModelPolicy, ...], workers: int, faults: FaultConfig | None = None
) -> SimConfig:
    """A small fast world without chance, for examples."""
    return SimConfig(
        controller=ControllerConfig(
            models,
            workers_expected=workers,
            settle_ns=100 * MS,
            sequences_max=16,
            remote_storage_bytes_per_s=1 << 28,
        ),
        devices=(make_device(1 << 30),) * workers,
        latency={"": LinearLatency(2 * MS, 50_000, 10)},
        kv_blocks=512,
        run_tokens_max=256,
        faults=faults if faults is not None else FaultConfig(),
    )
