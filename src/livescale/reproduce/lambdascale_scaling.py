"""λScale's claims about loading and about ramping up from a cold start."""

from livescale.reproduce.claim import Conditions, Curve, Measured, Picture
from livescale.reproduce.models import cluster_of, layers_of
from livescale.reproduce.multicasts import GBIT_BYTES, NS_PER_S, device, plan_of, predicted_s
from livescale.sim.pools.configs import PooledModel, build_config
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.topology import Host, Topology
from livescale.traces import TraceRow
from livescale.types import WorkerRef, agent_ref

_SSD = 5_000_000_000
_HOST_LINK = 64_000_000_000
"""λScale, Table 1: bytes per second of a node's SSD and of its way from host memory."""
_IDLE_NS = NS_PER_S
_BURST_AFTER_NS = 120 * NS_PER_S
"""Long enough for one request to be served from SSD and its instance to go."""
_FIRST_S = 0.125
"""Where the picture begins: before any instance can be loaded."""
_BURST = 400
"""Requests of 2,000 tokens: more than twice what makes the policy want every instance."""
_RAMPS = (
    ("llama-2-7b", 1, "lambdascale-1"),
    ("llama-2-13b", 1, "lambdascale-1"),
    ("llama-2-70b", 4, "lambdascale-2"),
)


def load_70b(conditions: Conditions) -> Measured:
    """λScale §2.2, §2.3: Llama-2-70B takes over 18 minutes at 1 Gbit/s, over 30 s from SSD, and is
    an order of magnitude faster from host memory."""
    layers = layers_of("llama-2-70b")
    slow = Topology(
        {WorkerRef(0): device(GBIT_BYTES, "host-0")}, remote_storage_bytes_per_s=GBIT_BYTES
    )
    node = Topology(
        {WorkerRef(0): device(400 * GBIT_BYTES, "host-0")},
        {agent_ref(0): Host("host-0", "leaf", 1 << 40, None, None, _HOST_LINK, _SSD)},
    )
    host = plan_of(node, layers, [agent_ref(0).worker], [0], "host")
    ssd_s = predicted_s(plan_of(node, layers, [], [0], "storage"))
    return Measured(
        {
            "network_min": predicted_s(plan_of(slow, layers, [], [0], "storage")) / 60,
            "ssd_s": ssd_s,
            "memory_s": predicted_s(host),
            "memory_ratio": ssd_s / predicted_s(host),
        }
    )


def cold_start_ramp(conditions: Conditions) -> Measured:
    """λScale §7.3, Figure 11: from one copy in host memory all nodes serve 3.75 to 11.4 times
    sooner than with ServerlessLLM, whose other nodes read their SSDs.

    One request brings the model once and lets it go; two minutes later a burst wants the whole
    testbed. ServerlessLLM's part is that each node reads its SSD, once. Counted until the last
    instance is loaded, without execution pipelines: with them the first tokens would come sooner.
    """
    figures: dict[str, float] = {}
    curves = []
    for preset, tp_size, cluster in _RAMPS:
        name = preset.removeprefix("llama-2-")
        for system, label in (
            ("binomial", "binomial pipeline"),
            ("storage", "ServerlessLLM"),
        ):
            loaded = _loaded_s(_ramp(preset, tp_size, cluster, system, conditions.seed))
            figures[f"{system}_{name}_s"] = loaded[-1]
            figures[f"{system}_{name}_instances"] = len(loaded)
            points = [(_FIRST_S, 0.0), *((s, float(n)) for n, s in enumerate(loaded, 1))]
            curves.append(Curve(f"{name}, {label}", tuple(points), is_step=True))
        figures[f"ratio_{name}"] = figures[f"storage_{name}_s"] / figures[f"binomial_{name}_s"]
    ratios = [value for key, value in figures.items() if key.startswith("ratio_")]
    figures |= {"ratio_min": min(ratios), "ratio_max": max(ratios)}
    picture = Picture(
        "Cold start: instances loaded",
        "time from the burst (s)",
        "instances",
        tuple(curves),
        is_log_x=True,
    )
    return Measured(figures, (picture,))


# -- helpers --------------------------------------------------------------------------------------


def _ramp(preset: str, tp_size: int, cluster: str, system: str, seed: int) -> PoolRun:
    model = PooledModel(preset, preset, tp_size, instances_min=0, idle_ns=_IDLE_NS)
    config = build_config(cluster_of(cluster), [model], SYSTEMS[system])
    burst = [TraceRow(_BURST_AFTER_NS, 2000, 16)] * _BURST
    return run_pool(config, {preset: [TraceRow(0, 2000, 16), *burst]}, lead_ns(config), seed)


def _loaded_s(run: PoolRun) -> list[float]:
    """When the instances that the burst called were loaded, from the burst on; each once."""
    burst_ns = run.started_ns + _BURST_AFTER_NS
    times: dict[int, int] = {}
    for line in run.result.scales:
        for load in line.loads:
            if line.decided_ns >= burst_ns and load.loaded_ns is not None:
                times[load.instance] = max(times.get(load.instance, 0), load.loaded_ns)
    return sorted((ns - burst_ns) / NS_PER_S for ns in times.values())
