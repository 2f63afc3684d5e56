"""BlitzScale's claims about loading and multicast: plans, their predictions, their transfers."""

from __future__ import annotations

from fractions import Fraction

from livescale.control.multicast.planner import free_uplinks
from livescale.control.pairing import choose_pairings
from livescale.reproduce import multicasts
from livescale.reproduce.claim import Conditions, Curve, Measured, Picture
from livescale.topology import Host, Topology
from livescale.types import WorkerRef, agent_ref

_SIZE_8B_BYTES = 16_000_000_000
_SIZE_72B_BYTES = 144_000_000_000
_LAYERS = 32


def chain_growth(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 13 (a): a serial chain's time is irrespective of its length.

    320 chunks of 1 MiB to n = 1..7 receivers over 8 Gbit/s, where a byte takes a nanosecond: the
    law, (C + n - 1) / C of one copy's time, can hold exactly.
    """
    rate = 8 * multicasts.GBIT_BYTES
    layers = (10 * multicasts.MIB,) * _LAYERS
    chunks = 10 * _LAYERS
    topology = multicasts.single_nodes([rate] * 8)
    one_copy_ns = Fraction(chunks * multicasts.MIB * multicasts.NS_PER_S, rate)
    predicted, simulated, apart_ns = [], [], Fraction(0)
    for n in range(1, 8):
        plan = multicasts.plan_of(topology, layers, [0], range(1, n + 1), "chain")
        predicted.append(multicasts.predicted_s(plan))
        simulated.append(multicasts.simulated_s(plan, topology, layers))
        assert plan.predicted_ns is not None
        law_ns = one_copy_ns * (chunks + n - 1) / chunks
        apart_ns = max(apart_ns, abs(plan.predicted_ns - law_ns))
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
    return Measured(figures, (picture,))


def faster_target_first(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 13 (b): the downtime of T2, whose link is twice as fast, halves when
    it comes before T1. The planner orders the chain itself."""
    rate = 100 * multicasts.GBIT_BYTES
    topology = multicasts.single_nodes([2 * rate, rate, 2 * rate])
    layers = (10 * multicasts.MIB,) * _LAYERS
    plan = multicasts.plan_of(topology, layers, [0], [1, 2], "chain")
    downtime_ns = max(plan.load_of(WorkerRef(2)).layer_ns)
    simulated_ns = max(multicasts.carry_out(plan, topology, layers)[WorkerRef(2)])
    behind_ns = sum(layers) * multicasts.NS_PER_S // rate
    return Measured(
        {
            "is_fast_first": float(plan.routes() == ("w0.0 -> w2.0 -> w1.0",)),
            "downtime_ratio": downtime_ns / behind_ns,
            "simulated_ratio": simulated_ns / behind_ns,
        }
    )


def sharded_transfer(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 14: between nodes of four GPUs every GPU's NIC carries a quarter,
    and the parts are exchanged over NVLink meanwhile. 16 GB over 100 Gbit/s and 1.6 Tbit/s."""
    topology = multicasts.grouped_nodes(
        2, 4, 100 * multicasts.GBIT_BYTES, 1600 * multicasts.GBIT_BYTES
    )
    layers = multicasts.even_layers(_SIZE_8B_BYTES, _LAYERS)
    sources, targets = range(4), range(4, 8)
    sharded = multicasts.plan_of(topology, layers, sources, targets, "sharded")
    one_nic = multicasts.plan_of(topology, layers, [0], targets, "chain")
    return Measured(
        {
            "predicted_ratio": multicasts.predicted_s(sharded) / multicasts.predicted_s(one_nic),
            "simulated_ratio": multicasts.simulated_s(sharded, topology, layers)
            / multicasts.simulated_s(one_nic, topology, layers),
        }
    )


def load_from_ssd(conditions: Conditions) -> Measured:
    """BlitzScale §1: loading Llama3-8B (16 GB) from an SSD of 10 Gbit/s."""
    topology = Topology(
        {WorkerRef(0): multicasts.device(100 * multicasts.GBIT_BYTES, "host-0")},
        {agent_ref(0): Host("host-0", "leaf", 0, storage_bytes_per_s=10 * multicasts.GBIT_BYTES)},
    )
    plan = multicasts.plan_of(
        topology, multicasts.even_layers(_SIZE_8B_BYTES, _LAYERS), [], [0], "storage"
    )
    return Measured({"load_s": multicasts.predicted_s(plan)})


def nvlink_broadcast(conditions: Conditions) -> Measured:
    """BlitzScale §4: NVLink broadcasts Llama3-8B to eight GPUs within 120 ms (1.6 Tbit/s: 80)."""
    topology = multicasts.grouped_nodes(
        1, 9, 100 * multicasts.GBIT_BYTES, 1600 * multicasts.GBIT_BYTES
    )
    layers = multicasts.even_layers(_SIZE_8B_BYTES, _LAYERS)
    plan = multicasts.plan_of(topology, layers, [0], range(1, 9), "auto")
    return Measured(
        {
            "predicted_ms": 1e3 * multicasts.predicted_s(plan),
            "simulated_ms": 1e3 * multicasts.simulated_s(plan, topology, layers),
        }
    )


def bandwidth_for_half_a_second(conditions: Conditions) -> Measured:
    """BlitzScale §3: Qwen2.5-72B on four GPUs within 500 ms needs 576 Gbit/s per GPU. The size is
    divided by the time, and a plan at that rate is timed. (The text also derives it from an SLO of
    1250 ms and a mean TTFT of 771 ms, which leave 479 ms.)"""
    shard = _SIZE_72B_BYTES // 4
    rate = shard * 2
    plan = multicasts.plan_of(
        multicasts.single_nodes([rate] * 2), multicasts.even_layers(shard, 80), [0], [1], "chain"
    )
    return Measured(
        {
            "gbit_per_s": rate / multicasts.GBIT_BYTES,
            "load_ms": 1e3 * multicasts.predicted_s(plan),
            "gbit_per_s_from_slo": shard / 0.479 / multicasts.GBIT_BYTES,
        }
    )


def interference_free_targets(conditions: Conditions) -> Measured:
    """BlitzScale §5.1, Figure 12: two prefill instances are overloaded, and two new ones help them
    while they load. Those whose NIC sends nothing for the plan help without interference: along
    one chain the tail, along two chains both. The controller's own pairings for these plans.
    """
    topology = multicasts.single_nodes([100 * multicasts.GBIT_BYTES] * 4)
    layers = multicasts.even_layers(_SIZE_8B_BYTES, _LAYERS)
    overloaded = [(1, WorkerRef(0)), (2, WorkerRef(1))]
    figures = {}
    for name, sources in (("one", [0]), ("two", [0, 1])):
        plan = multicasts.plan_of(topology, layers, sources, [2, 3], "chain")
        choices = choose_pairings(plan, "zigzag", 0, overloaded)
        helped = {
            plan.instances[i][0]: choice.pairing.source
            for i, choice in enumerate(choices)
            if choice.pairing is not None and choice.pairing.source is not None
        }
        free = free_uplinks(plan)
        figures[f"{name}_chain{'s' * (len(sources) - 1)}"] = float(len(free))
        figures[f"helpers_of_{name}"] = float(len(set(helped.values())))
        if len(free) == 1:
            # The source that needs help most gets it from there.
            figures["is_tail"] = float(helped.get(WorkerRef(3)) == WorkerRef(0))
            figures["is_tail"] *= float(free == (WorkerRef(3),))
    return Measured(figures)
