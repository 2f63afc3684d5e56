"""λScale's claims about multicast: steps, orders, transfer times beside FaaSNet's tree and NCCL.

Steps and orders are read off plans of the production planner, times off its predictions and off the
simulator's transfers of the same plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from livescale.chunks import ChunkGrid
from livescale.control.multicast.binomial import BinomialPlan
from livescale.control.multicast.fabric import Fabric
from livescale.plans import ScalePlan
from livescale.reproduce import multicasts
from livescale.reproduce.claim import Conditions, Curve, Measured, Picture
from livescale.reproduce.models import layers_of
from livescale.sim.pools.systems import SYSTEMS
from livescale.types import WorkerRef

_NIC = 400 * multicasts.GBIT_BYTES
"""λScale, Table 1: InfiniBand of 400 Gbit/s per node."""
_MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
_NODES = (4, 8, 12)
_BYTE_PER_NS = 8 * multicasts.GBIT_BYTES
_SETUP_S = SYSTEMS["nccl"].group_setup_ns / multicasts.NS_PER_S
_RDMA_MESSAGE_NS = 25_000
"""What a message over RDMA costs besides its bytes: 20 to 30 µs in public measurements."""


def pipeline_steps(conditions: Conditions) -> Measured:
    """λScale §4.2: b blocks are on N nodes after b + ceil(log2 N) - 1 steps.

    For N = 2..16 and b = 1..32 the planner's prediction is divided by the time of one block.
    """
    worst = 0.0
    for nodes, blocks in itertools.product(range(2, 17), range(1, 33)):
        ns = _pipeline_ns(nodes, blocks, blocks * multicasts.MIB)
        worst = max(worst, abs(ns / multicasts.MIB - (blocks + math.ceil(math.log2(nodes)) - 1)))
    return Measured({"plans": 15 * 32, "steps_apart_max": worst})


def pipeline_time(conditions: Conditions) -> Measured:
    """λScale §4.2: T is proportional to M (1 + log N / b).

    With steps counted exactly it is M (1 + (log2 N - 1) / b): for N = 2..64, b = 4..32 and models
    of 64 and 128 MiB, the deviation of the planner's prediction.
    """
    worst = 0.0
    cases = itertools.product(
        (2, 4, 8, 16, 32, 64), (4, 8, 16, 32), (64 * multicasts.MIB, 128 * multicasts.MIB)
    )
    for nodes, blocks, size in cases:
        expected_ns = size * (1 + (math.log2(nodes) - 1) / blocks)
        worst = max(worst, abs(_pipeline_ns(nodes, blocks, size) / expected_ns - 1))
    return Measured({"apart_percent_max": 100 * worst})


def transfer_orders(conditions: Conditions) -> Measured:
    """λScale §4.2, Figure 5, Algorithm 1: two sources, six more nodes, four blocks.

    In which order blocks first come to each sub-group; and the pairs of nodes whose blocks
    together are a whole model before either has one.
    """
    plan = _small_plan([0, 1], range(2, 8))
    groups = (range(2, 5), range(5, 8))
    orders = [_order(plan, group) for group in groups]
    pairs = list(zip(*groups, strict=True))
    early = [pair for pair in pairs if _whole_ns([pair], plan) < _alone_ns(pair, plan)]
    return Measured(
        {
            "first": _digits(orders[0]),
            "second": _digits(orders[1]),
            "early_pairs": len(early),
            "first_pair_step": _whole_ns(pairs[:1], plan) / multicasts.MIB,
        }
    )


def first_complete_model(conditions: Conditions) -> Measured:
    """λScale §4.2: with k sources the first complete model is there after b / k steps.

    Figure 5's example. Counted in steps until some pair of nodes of the two sub-groups together
    holds all blocks; without reordering both sub-groups get the blocks in one order.
    """
    plan = _small_plan([0, 1], range(2, 8))
    pairs = list(zip(range(2, 5), range(5, 8), strict=True))
    plain = _small_plan([0], range(1, 4))
    return Measured(
        {
            "steps": _whole_ns(pairs, plan) / multicasts.MIB,
            "first_pair_steps": _whole_ns(pairs[:1], plan) / multicasts.MIB,
            "plain_steps": min(max(load.layer_ns) for load in plain.loads) / multicasts.MIB,
        }
    )


def multicast_13b(conditions: Conditions) -> Measured:
    """λScale §1, §7.2: Llama-2-13B is on eight nodes in less than a second, up to 1.5 times as fast
    as NCCL (a broadcast in a chain, after its group is formed)."""
    ours, _, nccl = _times(8, layers_of("llama-2-13b"), is_simulated=True)
    predicted = multicasts.predicted_s(_plan(8, layers_of("llama-2-13b"), "binomial"))
    return Measured({"simulated_s": ours, "predicted_s": predicted, "nccl_ratio": nccl / ours})


def multicast_speedups(conditions: Conditions) -> Measured:
    """λScale §7.2, Figure 7: up to 1.82 times as fast as FaaSNet's binary tree and 1.53 times as
    NCCL, growing with model and cluster. 7B, 13B and 70B on 4, 8 and 12 nodes, one source."""
    figures: dict[str, float] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    for model, nodes in itertools.product(_MODELS, _NODES):
        layers = layers_of(model)
        ours, tree, nccl = _times(nodes, layers, is_simulated=True)
        predicted, its_tree, its_nccl = _times(nodes, layers, is_simulated=False)
        name = f"{model.removeprefix('llama-2-')}_{nodes}"
        figures[f"tree_{name}"], figures[f"nccl_{name}"] = tree / ours, nccl / ours
        figures[f"predicted_tree_{name}"] = its_tree / predicted
        figures[f"predicted_nccl_{name}"] = its_nccl / predicted
        lines.setdefault(f"{model}: over tree", []).append((nodes, tree / ours))
        lines.setdefault(f"{model}: over NCCL", []).append((nodes, nccl / ours))
    for peer in ("tree", "nccl", "predicted_tree", "predicted_nccl"):
        figures[f"{peer}_max"] = max(v for k, v in figures.items() if k.startswith(f"{peer}_"))
    curves = tuple(Curve(label, tuple(points)) for label, points in lines.items())
    picture = Picture("Multicast: how much faster the binomial pipeline is", "nodes", "×", curves)
    return Measured(figures, (picture,))


def block_arrivals(conditions: Conditions) -> Measured:
    """λScale §7.2, Figure 8: Llama-2-13B. The pipeline's blocks come as early on any number of
    nodes, NCCL's first waits for its group, the tree's tail grows with the cluster.

    Layers stand for blocks; times are those of the receiver that is complete last, simulated.
    """
    layers = layers_of("llama-2-13b")
    last: dict[tuple[str, int], list[float]] = {}
    for strategy, nodes in itertools.product(("binomial", "tree", "chain"), _NODES):
        plan = _plan(nodes, layers, strategy)
        arrivals = multicasts.carry_out(plan, multicasts.single_nodes([_NIC] * nodes), layers)
        slowest = max(arrivals.values(), key=max)
        setup_s = _SETUP_S if strategy == "chain" else 0.0
        last[strategy, nodes] = sorted(ns / multicasts.NS_PER_S + setup_s for ns in slowest)
    figures = {
        "pipeline_growth_percent": 100 * (last["binomial", 12][-1] / last["binomial", 4][-1] - 1),
        "tree_growth_percent": 100 * (last["tree", 12][-1] / last["tree", 4][-1] - 1),
        "tree_tail_s": last["tree", 12][-1],
        "pipeline_tail_s": last["binomial", 12][-1],
        "pipeline_first_s": last["binomial", 12][0],
        "nccl_first_s": last["chain", 12][0],
    }
    names = {"binomial": "binomial pipeline", "tree": "binary tree", "chain": "NCCL-like chain"}
    curves = tuple(
        Curve(
            f"{names[strategy]}, {nodes} nodes", tuple(_distribution(last[strategy, nodes])), True
        )
        for strategy in names
        for nodes in (4, 12)
    )
    picture = Picture("Llama-2-13B: layers at the last receiver", "time (s)", "part", curves)
    return Measured(figures, (picture,))


def best_block_count(conditions: Conditions) -> Measured:
    """λScale §7.5, Figure 18: 16 blocks have the least latency, 8 and 24 to 48 more.

    Llama-2-13B on eight nodes. A block costs a message over RDMA besides its bytes. The paper does
    not say what a block costs there; the cost with which 16 would be best follows from its own
    formula: b² = (log2 N - 1) · M / (B · cost).
    """
    layers = layers_of("llama-2-13b")
    counts = (2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384)
    times = {b: _blocks_ns(8, b, layers) / 1e6 for b in counts}
    best = min(times, key=lambda b: times[b])
    wire_ms = sum(layers) / _NIC * 1e3
    figures = {
        "best_blocks": best,
        "ms_at_8": times[8],
        "ms_at_16": times[16],
        "ms_at_48": times[48],
        "ms_at_best": times[best],
        "cost_for_16_ms": 2 * wire_ms / 16**2,
    }
    curve = Curve("25 µs a block", tuple((b, ms) for b, ms in times.items()))
    picture = Picture("Llama-2-13B to 8 nodes", "blocks", "time (ms)", (curve,), is_log_x=True)
    return Measured(figures, (picture,))


# -- helpers, in the order used -------------------------------------------------------------------


def _pipeline_ns(nodes: int, blocks: int, size_bytes: int) -> int:
    """The planner's prediction where a byte takes a nanosecond."""
    grid = ChunkGrid((size_bytes,), size_bytes // blocks)
    elements = [(WorkerRef(number),) for number in range(nodes)]
    plan = BinomialPlan(grid, elements[:1], elements[1:], blocks)
    ns = plan.predict(Fabric(multicasts.single_nodes([_BYTE_PER_NS] * nodes))).completed_ns
    assert ns is not None, "all rates are known"
    return ns


def _small_plan(sources: Sequence[int], targets: Sequence[int]) -> ScalePlan:
    """Figure 5's: four blocks (here layers of one chunk) that take a step of 1 MiB each."""
    topology = multicasts.single_nodes([_BYTE_PER_NS] * 8)
    return multicasts.plan_of(topology, (multicasts.MIB,) * 4, sources, targets, "binomial")


def _order(plan: ScalePlan, group: Sequence[int]) -> list[int]:
    """Blocks in the order in which they first come to a node of the group."""
    times = [plan.load_of(WorkerRef(number)).layer_ns for number in group]
    return sorted(range(4), key=lambda block: min(its[block] for its in times))


def _digits(order: Sequence[int]) -> int:
    """The order as the paper writes it: blocks count from 1."""
    return int("".join(str(block + 1) for block in order))


def _whole_ns(pairs: Sequence[tuple[int, int]], plan: ScalePlan) -> int:
    """When the first of these pairs together holds every block."""
    found: list[int] = []
    for pair in pairs:
        times = [plan.load_of(WorkerRef(number)).layer_ns for number in pair]
        found.append(max(min(its) for its in zip(*times, strict=True)))
    return min(found)


def _alone_ns(pair: tuple[int, int], plan: ScalePlan) -> int:
    return min(max(plan.load_of(WorkerRef(number)).layer_ns) for number in pair)


def _plan(nodes: int, layers: Sequence[int], strategy: str) -> ScalePlan:
    """From one node to the others."""
    topology = multicasts.single_nodes([_NIC] * nodes)
    return multicasts.plan_of(topology, layers, [0], range(1, nodes), strategy)


def _times(nodes: int, layers: Sequence[int], is_simulated: bool) -> tuple[float, float, float]:
    """Seconds of the binomial pipeline, of FaaSNet's binary tree and of NCCL's broadcast."""
    times = []
    for strategy in ("binomial", "tree", "chain"):
        plan = _plan(nodes, layers, strategy)
        if is_simulated:
            times.append(
                multicasts.simulated_s(plan, multicasts.single_nodes([_NIC] * nodes), layers)
            )
        else:
            times.append(multicasts.predicted_s(plan))
    pipeline, tree, chain = times
    return pipeline, tree, chain + _SETUP_S


def _blocks_ns(nodes: int, blocks: int, layers: Sequence[int]) -> float:
    """The pipeline's time with so many blocks, each of which costs a message in every step."""
    grid = ChunkGrid(layers, multicasts.MIB)
    elements = [(WorkerRef(number),) for number in range(nodes)]
    plan = BinomialPlan(grid, elements[:1], elements[1:], blocks)
    ns = plan.predict(Fabric(multicasts.single_nodes([_NIC] * nodes))).completed_ns
    assert ns is not None, "all rates are known"
    return ns + (blocks + math.ceil(math.log2(nodes)) - 1) * _RDMA_MESSAGE_NS


def _distribution(times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Points of a cumulative distribution."""
    yield 0.0, 0.0
    for number, time in enumerate(times, 1):
        yield time, number / len(times)
