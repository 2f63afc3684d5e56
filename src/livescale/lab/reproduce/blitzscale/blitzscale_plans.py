"""BlitzScale's claims about loading and multicast: plans, their predictions, their transfers."""

from __future__ import annotations

from fractions import Fraction

from livescale.clusters.topology import Host, Topology
from livescale.control.multicast.planner import free_uplinks
from livescale.control.together.pairing import choose_pairings
from livescale.lab.reproduce.base.claim import (
    Conditions,
    Curve,
    Measured,
    Picture,
    claim,
    is_near,
    near,
)
from livescale.lab.reproduce.base.multicasts import (
    MIB,
    Multicast,
    device,
    even_layers,
    grouped_nodes,
    single_nodes,
)
from livescale.values.routes import Partner
from livescale.values.types import WorkerRef, agent_ref
from livescale.values.units import GBIT_BYTES, NS_PER_S

_SIZE_8B_BYTES = 16_000_000_000
_SIZE_72B_BYTES = 144_000_000_000
_LAYERS = 32


@claim(
    id="B5",
    judges="planner",
    setup="serial chain, 1 to 7 receivers, 320 chunks",
    paper="multicast time independent of the number of receivers",
    tolerance="grows by at most 5 %; (C + n - 1) / C exactly",
    ours="planned +{predicted_growth_percent:.2f} %, simulated"
    " +{simulated_growth_percent:.2f} %; {law_apart_ns:.0f} ns from the law",
    is_within=lambda f: (
        max(f["predicted_growth_percent"], f["simulated_growth_percent"]) <= 5
        and f["law_apart_ns"] == 0
    ),
)
def chain_growth(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 13 (a). Chunks of 1 MiB over 8 Gbit/s, where a byte takes a
    nanosecond: the law, (C + n - 1) / C of one copy's time, can hold exactly."""
    rate = 8 * GBIT_BYTES
    layers = (10 * MIB,) * _LAYERS
    chunks = 10 * _LAYERS
    topology = single_nodes([rate] * 8)
    one_copy_ns = Fraction(chunks * MIB * NS_PER_S, rate)
    predicted, simulated, apart_ns = [], [], Fraction(0)
    for n in range(1, 8):
        chain = Multicast(topology, layers, [0], range(1, n + 1))
        predicted.append(chain.predicted_s)
        simulated.append(chain.simulated_s)
        law_ns = one_copy_ns * (chunks + n - 1) / chunks
        apart_ns = max(apart_ns, abs(chain.predicted_ns - law_ns))
    figures = {
        "predicted_growth_percent": 100 * (predicted[-1] / predicted[0] - 1),
        "simulated_growth_percent": 100 * (simulated[-1] / simulated[0] - 1),
        "law_apart_ns": float(apart_ns),
    }
    curves = tuple(
        Curve(label, tuple((n, 1e3 * s) for n, s in enumerate(times, 1)))
        for label, times in (("planned", predicted), ("simulated", simulated))
    )
    picture = Picture("Serial chain of 320 chunks", "receivers", "time (ms)", curves)
    return Measured(figures, picture)


@claim(
    id="B6",
    judges="planner",
    setup="chain to T1 and T2, T2's link twice as fast",
    paper="T2's downtime halves when it comes first",
    tolerance="exact (to 0.001 %)",
    ours="planned × {downtime_ratio:.6f}, simulated × {simulated_ratio:.6f}",
    is_within=near(1e-5, is_fast_first=1, downtime_ratio=0.5, simulated_ratio=0.5),
)
def faster_target_first(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 13 (b). The planner orders the chain itself."""
    rate = 100 * GBIT_BYTES
    topology = single_nodes([2 * rate, rate, 2 * rate])
    layers = (10 * MIB,) * _LAYERS
    chain = Multicast(topology, layers, [0], [1, 2])
    downtime_ns = max(chain.plan.load_of(WorkerRef(2)).layer_ns)
    simulated_ns = max(chain.arrivals_ns[WorkerRef(2)])
    behind_ns = sum(layers) * NS_PER_S // rate
    return Measured(
        {
            "is_fast_first": float(chain.plan.routes() == ("w0.0 -> w2.0 -> w1.0",)),
            "downtime_ratio": downtime_ns / behind_ns,
            "simulated_ratio": simulated_ns / behind_ns,
        }
    )


@claim(
    id="B7",
    judges="planner",
    setup="sharded transfer between nodes of 4 GPUs",
    paper="1/4 of one NIC's time",
    tolerance="± 5 %",
    ours="planned × {predicted_ratio:.4f}, simulated × {simulated_ratio:.4f}",
    is_within=near(0.05, predicted_ratio=0.25, simulated_ratio=0.25),
)
def sharded_transfer(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 14. Every GPU's NIC carries a quarter, and the parts are exchanged
    over NVLink meanwhile. 16 GB over 100 Gbit/s and 1.6 Tbit/s."""
    topology = grouped_nodes(2, 4, 100 * GBIT_BYTES, 1600 * GBIT_BYTES)
    layers = even_layers(_SIZE_8B_BYTES, _LAYERS)
    sharded = Multicast(topology, layers, range(4), range(4, 8), "sharded")
    one_nic = Multicast(topology, layers, [0], range(4, 8))
    return Measured(
        {
            "predicted_ratio": sharded.predicted_s / one_nic.predicted_s,
            "simulated_ratio": sharded.simulated_s / one_nic.simulated_s,
        }
    )


@claim(
    id="B8",
    judges="arithmetic",
    setup="Llama3-8B from an SSD of 10 Gbit/s",
    paper="12.8 s",
    tolerance="± 2 %",
    ours="{load_s:.2f} s",
    is_within=near(0.02, load_s=12.8),
    note="the notes to the paper say 8 s for the same load",
)
def load_from_ssd(conditions: Conditions) -> Measured:
    """BlitzScale §1. 16 GB."""
    topology = Topology(
        {WorkerRef(0): device(100 * GBIT_BYTES, "host-0")},
        {agent_ref(0): Host("host-0", "leaf", 0, storage_bytes_per_s=10 * GBIT_BYTES)},
    )
    storage = Multicast(topology, even_layers(_SIZE_8B_BYTES, _LAYERS), [], [0], "storage")
    return Measured({"load_s": storage.predicted_s})


@claim(
    id="B9",
    judges="planner",
    setup="Llama3-8B by NVLink to 8 GPUs",
    paper="within 120 ms",
    tolerance="≤ 120 ms",
    ours="planned {predicted_ms:.1f} ms, simulated {simulated_ms:.1f} ms",
    is_within=lambda f: max(f["predicted_ms"], f["simulated_ms"]) <= 120,
)
def nvlink_broadcast(conditions: Conditions) -> Measured:
    """BlitzScale §4. NVLink of 1.6 Tbit/s takes 80 ms."""
    topology = grouped_nodes(1, 9, 100 * GBIT_BYTES, 1600 * GBIT_BYTES)
    layers = even_layers(_SIZE_8B_BYTES, _LAYERS)
    to_all = Multicast(topology, layers, [0], range(1, 9), "auto")
    return Measured(
        {"predicted_ms": 1e3 * to_all.predicted_s, "simulated_ms": 1e3 * to_all.simulated_s}
    )


@claim(
    id="B10",
    judges="arithmetic",
    setup="Qwen2.5-72B on 4 GPUs within 500 ms",
    paper="576 Gbit/s per GPU",
    tolerance="exact",
    ours="{gbit_per_s:.0f} Gbit/s load it in {load_ms:.0f} ms",
    is_within=lambda f: f["gbit_per_s"] == 576 and is_near(f["load_ms"], 500, 1e-6),
    note="the SLO of 1250 ms less the mean TTFT of 771 ms leaves 479 ms, which takes 601"
    " Gbit/s; 576 is for 40 % of the requests in the introduction, for all in §3",
)
def bandwidth_for_half_a_second(conditions: Conditions) -> Measured:
    """BlitzScale §3. The size is divided by the time, and a plan at that rate is timed."""
    shard = _SIZE_72B_BYTES // 4
    rate = shard * 2
    chain = Multicast(single_nodes([rate] * 2), even_layers(shard, 80), [0], [1])
    return Measured(
        {
            "gbit_per_s": rate / GBIT_BYTES,
            "load_ms": 1e3 * chain.predicted_s,
            "gbit_per_s_from_slo": shard / 0.479 / GBIT_BYTES,
        }
    )


@claim(
    id="B38",
    judges="planner",
    setup="two overloaded prefill instances, two new ones that help while they load",
    paper="without interference: one chain, the tail only; two chains, both",
    tolerance="exact",
    ours="{one_chain:.0f} of {helpers_of_one:.0f} helpers along one chain, {two_chains:.0f} of"
    " {helpers_of_two:.0f} along two",
    is_within=near(0, one_chain=1, is_tail=1, two_chains=2, helpers_of_one=2, helpers_of_two=2),
)
def interference_free_targets(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 12. Those whose NIC sends nothing for the plan help without
    interference. The controller's own pairings for these plans."""
    topology = single_nodes([100 * GBIT_BYTES] * 4)
    layers = even_layers(_SIZE_8B_BYTES, _LAYERS)
    overloaded = [Partner(1, WorkerRef(0)), Partner(2, WorkerRef(1))]
    figures = {}
    for name, sources in (("one", [0]), ("two", [0, 1])):
        plan = Multicast(topology, layers, sources, [2, 3]).plan
        choices = choose_pairings(plan, "zigzag", 0, overloaded)
        helped = {
            plan.instances[i][0]: partner.worker
            for i, choice in enumerate(choices)
            for partner in choice.gives_to
        }
        free = free_uplinks(plan)
        figures[f"{name}_chain{'s' * (len(sources) - 1)}"] = float(len(free))
        figures[f"helpers_of_{name}"] = float(len(set(helped.values())))
        if len(free) == 1:
            # The source that needs help most gets it from there.
            figures["is_tail"] = float(helped.get(WorkerRef(3)) == WorkerRef(0))
            figures["is_tail"] *= float(free == (WorkerRef(3),))
    return Measured(figures)
