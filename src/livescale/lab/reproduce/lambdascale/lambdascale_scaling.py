"""λScale's claims about loading and about ramping up from a cold start."""

from __future__ import annotations

import msgspec

from livescale.clusters.topology import Host, Topology
from livescale.lab.reproduce.base.claim import (
    Conditions,
    Curve,
    Measured,
    Picture,
    claim,
    is_near,
    near,
)
from livescale.lab.reproduce.base.half_loads import (
    Setup,
    half_loaded,
    kv_behind,
    ttft_percentile_s,
    ttfts_ns,
)
from livescale.lab.reproduce.base.models import cluster_of, layers_of
from livescale.lab.reproduce.base.multicasts import Multicast, device
from livescale.lab.reproduce.base.sharing import shared
from livescale.load.traces import TraceRow
from livescale.sim.pools.configs import build_config, tokens_max
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import PoolRun, fit_rows, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.values.copy_strategies import NoCopies
from livescale.values.types import WorkerRef, agent_ref
from livescale.values.units import GBIT_BYTES, NS_PER_S

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
_PEERS = ("tree", "nccl", "storage")
"""FaaSNet, NCCL, and ServerlessLLM without a copy in memory."""
_TEAMS = "lambda-pairs"
"""Execution pipelines as the paper has them; `binomial` stops the world."""
_OVER_A_TRACE = ("binomial", _TEAMS, "tree", "nccl", "serverlessllm", "ideal-bounds")
_OVER_THE_WINDOW = ("faasnet", "nccl-ssd", "serverlessllm", "ideal-bounds")
"""§7.5: FaaSNet and NCCL read SSD where no device holds the model, λScale has a copy on a host."""
_KEEP_ALIVE_NS = 15 * NS_PER_S
"""How long a model stays without requests: §3's time, as §7.5 gives none."""
BURSTS = Setup(
    "burstgpt2gpt4_5539015_5min", "llama-2-13b", "lambdascale-1", played_ns=60 * NS_PER_S
)
_RAMPS = (
    ("llama-2-7b", 1, "lambdascale-1"),
    ("llama-2-13b", 1, "lambdascale-1"),
    ("llama-2-70b", 4, "lambdascale-2"),
)


@claim(
    id="L20",
    judges="arithmetic",
    corrected="28 s from SSD by the paper's own rate, not more than 30 s",
    setup="Llama-2-70B from network, SSD, host memory",
    paper="> 18 min at 1 Gbit/s; > 30 s; about 10 × faster",
    tolerance="> 18 min; 28 s ± 5 %; 8 to 15 ×",
    ours="{network_min:.1f} min; {ssd_s:.1f} s; {memory_s:.2f} s ({memory_ratio:.1f} ×)",
    is_within=lambda f: (
        f["network_min"] > 18 and is_near(f["ssd_s"], 28, 0.05) and 8 <= f["memory_ratio"] <= 15
    ),
    note="30 s is a measurement; 140 GB at the SSD's 5 GB/s take 28 s",
)
def load_70b(conditions: Conditions) -> Measured:
    """λScale §2.2, §2.3."""
    layers = layers_of("llama-2-70b")
    slow = Topology(
        {WorkerRef(0): device(GBIT_BYTES, "host-0")}, remote_storage_bytes_per_s=GBIT_BYTES
    )
    node = Topology(
        {WorkerRef(0): device(400 * GBIT_BYTES, "host-0")},
        {agent_ref(0): Host("host-0", "leaf", 1 << 40, None, None, _HOST_LINK, _SSD)},
    )
    network_s = Multicast(slow, layers, [], [0], "storage").predicted_s
    ssd_s = Multicast(node, layers, [], [0], "storage").predicted_s
    memory_s = Multicast(node, layers, [agent_ref(0).worker], [0], "host").predicted_s
    return Measured(
        {
            "network_min": network_s / 60,
            "ssd_s": ssd_s,
            "memory_s": memory_s,
            "memory_ratio": ssd_s / memory_s,
        }
    )


@claim(
    id="L10",
    judges="pool",
    setup="cold start from one host copy, 7B and 13B on testbed 1, 70B on testbed 2",
    paper="3.75 to 11.4 × ServerlessLLM (SSD)",
    tolerance="3 to 12 ×",
    ours="{ratio_7b:.1f} × (7B), {ratio_13b:.1f} × (13B), {ratio_70b:.1f} × (70B) until all"
    " instances are loaded",
    is_within=lambda f: f["ratio_min"] >= 3 and f["ratio_max"] <= 12,
    note="without execution pipelines, which would serve before the last layer",
)
def cold_start_ramp(conditions: Conditions) -> Measured:
    """λScale §7.3, Figure 11. One request brings the model once and lets it go; two minutes later a
    burst wants the whole testbed. ServerlessLLM's part is that each node reads its SSD, once.
    Counted until the last instance is loaded, without execution pipelines: with them the first
    tokens would come sooner."""
    figures: dict[str, float] = {"failed": 0}
    curves = []
    for preset, tp_size, cluster in _RAMPS:
        name = preset.removeprefix("llama-2-")
        for system, label in (
            ("binomial", "binomial pipeline"),
            ("storage", "ServerlessLLM"),
        ):
            run = _ramp(preset, tp_size, cluster, system, conditions.seed)
            loaded = _loaded_s(run)
            figures["failed"] += run.failed
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
    return Measured(figures, picture)


@claim(
    id="L11",
    judges="pool",
    setup="testbed 1, one instance of 13B that serves, 50 prompts of 2,000 tokens at once",
    paper="all 50 begin within 1.1 s, 2 × as fast as FaaSNet, 1.4 × NCCL, 8 × ServerlessLLM",
    tolerance="± 25 %",
    ours="{teams_s:.2f} s; {teams_tree_ratio:.2f} ×, {teams_nccl_ratio:.2f} ×,"
    " {teams_storage_ratio:.2f} × (stop-the-world {ours_s:.2f} s; {tree_ratio:.2f} ×,"
    " {nccl_ratio:.2f} ×, {storage_ratio:.2f} ×)",
    is_within=near(
        0.25, teams_s=1.1, teams_tree_ratio=2, teams_nccl_ratio=1.4, teams_storage_ratio=8
    ),
    note="judged with teams. The paper gives neither the prompts' length nor the number of copies"
    " of the model",
)
def all_begun(conditions: Conditions) -> Measured:
    """λScale §7.4, Figure 12: until the last of 50 requests has its first token."""
    runs = {name: _fifty(name, conditions.seed) for name in ("binomial", _TEAMS, *_PEERS)}
    times = {name: ttft_percentile_s(run, 100) for name, run in runs.items()}
    figures = {"ours_s": times["binomial"], "teams_s": times[_TEAMS]}
    for name in _PEERS:
        figures[f"{name}_ratio"] = times[name] / times["binomial"]
        figures[f"teams_{name}_ratio"] = times[name] / times[_TEAMS]
    curves = tuple(Curve(name, _begun(run)) for name, run in runs.items())
    picture = Picture("Requests that have begun", "time (s)", "requests", curves)
    return Measured({**figures, "failed": sum(run.failed for run in runs.values())}, picture)


@claim(
    id="L13",
    judges="pool",
    setup="13B on testbed 1, the public window of BurstGPT as it was recorded, scale to zero:"
    " device time. FaaSNet and NCCL without host copies",
    paper="up to 17.8, 18.1, 31.3 % less than FaaSNet, NCCL, ServerlessLLM; 4.3 to 18.6 % above"
    " ideal",
    tolerance="± 8 percentage points; 2 to 25 % above ideal",
    ours="{window_faasnet_saved:.1f}, {window_nccl_saved:.1f}, {window_serverlessllm_saved:.1f} %"
    " less; {window_above_ideal:.1f} % above ideal (without a host copy"
    " {window_bare_saved:.1f} % less than FaaSNet). At half of capacity, where all but"
    " ServerlessLLM have copies (first minute): {teams_tree_saved:.1f}, {teams_nccl_saved:.1f},"
    " {teams_serverlessllm_saved:.1f}; {teams_above_ideal:.1f} (stop-the-world {tree_saved:.1f},"
    " {nccl_saved:.1f}, {serverlessllm_saved:.1f}; {above_ideal:.1f})",
    is_within=lambda f: (
        abs(f["window_faasnet_saved"] - 17.8) <= 8
        and abs(f["window_nccl_saved"] - 18.1) <= 8
        and abs(f["window_serverlessllm_saved"] - 31.3) <= 8
        and 2 <= f["window_above_ideal"] <= 25
    ),
    note="judged with teams and as the paper says it: a trace that is not scaled, no instance"
    " without requests. The public window has 293 s of the paper's 30 minutes, and hardly ever"
    " needs more than one instance",
)
def device_time(conditions: Conditions) -> Measured:
    """λScale §7.5, Figure 14."""
    runs = {name: half_loaded(BURSTS, name, conditions) for name in _OVER_A_TRACE}
    held = {name: run.device_ns() for name, run in runs.items()}
    figures: dict[str, float] = {}
    for prefix, ours in (("", held["binomial"]), ("teams_", held[_TEAMS])):
        for name in ("tree", "nccl", "serverlessllm"):
            figures[f"{prefix}{name}_saved"] = 100 * (1 - ours / held[name])
        figures[f"{prefix}above_ideal"] = 100 * (ours / held["ideal-bounds"] - 1)
    ours_run, bare, peers = _window_runs(conditions)
    ours = ours_run.device_ns()
    for name, peer in peers.items():
        figures[f"window_{_short(name)}_saved"] = 100 * (1 - ours / peer.device_ns())
    figures["window_bare_saved"] = 100 * (1 - bare.device_ns() / peers["faasnet"].device_ns())
    figures["window_above_ideal"] = 100 * (ours / peers["ideal-bounds"].device_ns() - 1)
    every = [*runs.values(), ours_run, bare, *peers.values()]
    return Measured({**figures, "failed": sum(run.failed for run in every)})


@claim(
    id="L14",
    judges="pool",
    setup="13B on testbed 1, the public window of BurstGPT as it was recorded, scale to zero: p90"
    " TTFT. FaaSNet and NCCL without host copies",
    paper="2.4 to 5 × better than FaaSNet, NCCL and ServerlessLLM",
    tolerance="at least 1.8 ×",
    ours="{window_faasnet_ratio:.2f} ×, {window_nccl_ratio:.2f} ×,"
    " {window_serverlessllm_ratio:.2f} × ({window_s:.2f} s, without a host copy"
    " {window_bare_s:.2f}); ideal {window_ideal_ratio:.2f} ×. At half of capacity, where all but"
    " ServerlessLLM have copies (first minute): {teams_tree_ratio:.2f}, {teams_nccl_ratio:.2f},"
    " {teams_serverlessllm_ratio:.2f}; ideal {teams_ideal_ratio:.2f} (stop-the-world"
    " {tree_ratio:.2f}, {nccl_ratio:.2f}, {serverlessllm_ratio:.2f}; {ideal_ratio:.2f})",
    is_within=lambda f: (
        min(f["window_faasnet_ratio"], f["window_nccl_ratio"], f["window_serverlessllm_ratio"])
        >= 1.8
    ),
    note="judged with teams and as the paper says it (see L13). The gain over FaaSNet and NCCL is"
    " that of the host copy alone, which ServerlessLLM has, too",
)
def tail_over_a_trace(conditions: Conditions) -> Measured:
    """λScale §7.5, Figure 15."""
    runs = {name: half_loaded(BURSTS, name, conditions) for name in _OVER_A_TRACE}
    tails = {name: ttft_percentile_s(run, 90) for name, run in runs.items()}
    figures = {
        f"{prefix}{_short(name)}_ratio": tail / tails[ours]
        for prefix, ours in (("", "binomial"), ("teams_", _TEAMS))
        for name, tail in tails.items()
    }
    ours_run, bare, peers = _window_runs(conditions)
    figures["window_s"] = ttft_percentile_s(ours_run, 90)
    figures["window_bare_s"] = ttft_percentile_s(bare, 90)
    for name, peer in peers.items():
        figures[f"window_{_short(name)}_ratio"] = ttft_percentile_s(peer, 90) / figures["window_s"]
    every = [*runs.values(), ours_run, bare, *peers.values()]
    return Measured({**figures, "failed": sum(run.failed for run in every)})


# -- helpers --------------------------------------------------------------------------------------


def _ramp(preset: str, tp_size: int, cluster: str, system: str, seed: int) -> PoolRun:
    model = PooledModel(preset, preset, tp_size, instances_min=0, idle_ns=_IDLE_NS)
    config = build_config(cluster_of(cluster), [model], SYSTEMS[system])
    burst = [TraceRow(_BURST_AFTER_NS, 2000, 16)] * _BURST
    return run_pool(config, {preset: [TraceRow(0, 2000, 16), *burst]}, lead_ns(config), seed)


def _window_runs(conditions: Conditions) -> tuple[PoolRun, PoolRun, dict[str, PoolRun]]:
    """The whole window: ours, ours without a copy on any host, and the others."""
    peers = {name: _over_the_window(name, conditions) for name in _OVER_THE_WINDOW}
    bare = _over_the_window(_TEAMS, conditions, has_copy=False)
    return _over_the_window(_TEAMS, conditions), bare, peers


@shared(PoolRun)
def _over_the_window(system: str, conditions: Conditions, has_copy: bool = True) -> PoolRun:
    """The trace as it was recorded. No instance is there without requests."""
    model = PooledModel(BURSTS.preset, BURSTS.preset, instances_min=0, idle_ns=_KEEP_ALIVE_NS)
    placed = SYSTEMS[system]
    if not has_copy:
        placed = msgspec.structs.replace(placed, placement=NoCopies())
    config = kv_behind(build_config(cluster_of(BURSTS.cluster), [model], placed))
    rows, _ = fit_rows(conditions.trace(BURSTS.trace), tokens_max(config, model.name))
    return run_pool(config, {model.name: rows}, lead_ns(config), conditions.seed)


def _short(system: str) -> str:
    return system.removesuffix("-bounds").removesuffix("-ssd")


def _fifty(system: str, seed: int) -> PoolRun:
    model = PooledModel("llama-2-13b", "llama-2-13b")
    config = build_config(cluster_of("lambdascale-1"), [model], SYSTEMS[system])
    burst = [TraceRow(0, 2000, 16)] * 50
    return run_pool(config, {model.name: burst}, lead_ns(config), seed)


def _begun(run: PoolRun) -> tuple[tuple[float, float], ...]:
    """Requests with a first token over time."""
    return tuple((ns / NS_PER_S, float(n)) for n, ns in enumerate(sorted(ttfts_ns(run)), 1))


def _loaded_s(run: PoolRun) -> list[float]:
    """When the instances that the burst called were loaded, from the burst on; each once."""
    burst_ns = run.started_ns + _BURST_AFTER_NS
    times: dict[int, int] = {}
    for line in run.result.scales:
        for load in line.loads:
            if line.decided_ns >= burst_ns and load.loaded_ns is not None:
                times[load.instance] = max(times.get(load.instance, 0), load.loaded_ns)
    return sorted((ns - burst_ns) / NS_PER_S for ns in times.values())
