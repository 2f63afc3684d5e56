"""λScale's claims about multicast: steps, orders, transfer times beside FaaSNet's tree and NCCL.

Steps and orders are read off plans of the production planner, times off its predictions and off the
simulator's transfers of the same plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from livescale.control.multicast.binomial import BinomialPlan
from livescale.control.multicast.fabric import Fabric
from livescale.lab.reproduce.base.claim import Conditions, Curve, Measured, Picture, claim, near
from livescale.lab.reproduce.base.models import layers_of
from livescale.lab.reproduce.base.multicasts import MIB, Multicast, single_nodes
from livescale.messages.scale_plan import ScalePlan
from livescale.sim.pools.systems import SYSTEMS
from livescale.values.chunks import ChunkGrid
from livescale.values.types import WorkerRef
from livescale.values.units import GBIT_BYTES, NS_PER_S

_NIC = 400 * GBIT_BYTES
"""λScale, Table 1: InfiniBand of 400 Gbit/s per node."""
_MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
_NODES = (4, 8, 12)
_BYTE_PER_NS = 8 * GBIT_BYTES
_SETUP_S = SYSTEMS["nccl"].group_setup_ns / NS_PER_S
_RDMA_MESSAGE_NS = 25_000
"""What a message over RDMA costs besides its bytes: 20 to 30 µs in public measurements."""
_SLOW_BLOCK_NS = 4_000_000
"""With about this cost of a block 16 of them are best."""


@claim(
    id="L1",
    judges="planner",
    setup="1 to N nodes, b blocks (N = 2 to 16, b = 1 to 32)",
    paper="b + ⌈log2 N⌉ - 1 steps",
    tolerance="exact",
    ours="{steps_apart_max:.0f} steps apart in {plans:.0f} plans",
    is_within=near(0, steps_apart_max=0),
)
def pipeline_steps(conditions: Conditions) -> Measured:
    """λScale §4.2. The planner's prediction, divided by the time of one block."""
    worst = 0.0
    for nodes, blocks in itertools.product(range(2, 17), range(1, 33)):
        ns = _pipeline_ns(nodes, blocks, ChunkGrid((blocks * MIB,), MIB), _BYTE_PER_NS)
        worst = max(worst, abs(ns / MIB - _steps(nodes, blocks)))
    return Measured({"plans": 15 * 32, "steps_apart_max": worst})


@claim(
    id="L2",
    judges="planner",
    corrected="log N - 1 in place of log N",
    setup="1 to N nodes, b blocks, model of M bytes",
    paper="time in proportion to M (1 + log N / b)",
    tolerance="exact, with log N - 1 for log N as in L1",
    ours="{apart_percent_max:.4f} % apart at most",
    is_within=lambda f: f["apart_percent_max"] < 1e-4,
)
def pipeline_time(conditions: Conditions) -> Measured:
    """λScale §4.2. With steps counted exactly it is M (1 + (log2 N - 1) / b): for N = 2..64, b =
    4..32 and models of 64 and 128 MiB, the deviation of the planner's prediction."""
    worst = 0.0
    cases = itertools.product((2, 4, 8, 16, 32, 64), (4, 8, 16, 32), (64 * MIB, 128 * MIB))
    for nodes, blocks, size in cases:
        expected_ns = size * (1 + (math.log2(nodes) - 1) / blocks)
        ns = _pipeline_ns(nodes, blocks, ChunkGrid((size,), size // blocks), _BYTE_PER_NS)
        worst = max(worst, abs(ns / expected_ns - 1))
    return Measured({"apart_percent_max": 100 * worst})


@claim(
    id="L3",
    judges="planner",
    setup="2 to 8 nodes, 4 blocks",
    paper="orders 1234 and 3412; nodes (3,6), (4,7), (5,8) work together",
    tolerance="exact",
    ours="orders {first:.0f} and {second:.0f}; {early_pairs:.0f} of these pairs are whole"
    " before either node",
    is_within=near(0, first=1234, second=3412, early_pairs=3),
)
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
            "first_pair_step": _whole_ns(pairs[:1], plan) / MIB,
        }
    )


@claim(
    id="L4",
    judges="planner",
    corrected="b / k + ⌈log2 L⌉ - 1 steps for a pair of nodes, not b / k",
    setup="2 to 8 nodes, 4 blocks: the first complete model",
    paper="after b / k = 2 steps",
    tolerance="as corrected: b / k + ⌈log2 L⌉ - 1 = 3; 5 without reordering",
    ours="{steps:.0f} steps (nodes 3 and 6: {first_pair_steps:.0f}), {plain_steps:.0f} without"
    " reordering",
    is_within=near(0, steps=3, plain_steps=5),
    note="⌈b / k⌉ steps are exact for the smallest set of nodes that covers the model (here four"
    " nodes); a pair needs ⌈log2 L⌉ - 1 more, until the last block of the part has reached a"
    " partner in its sub-group of L = 4",
)
def first_complete_model(conditions: Conditions) -> Measured:
    """λScale §4.2, Figure 5's example. Counted in steps until some pair of nodes of the two sub-
    groups together holds all blocks; without reordering both sub-groups get the blocks in one
    order."""
    plan = _small_plan([0, 1], range(2, 8))
    pairs = list(zip(range(2, 5), range(5, 8), strict=True))
    plain = _small_plan([0], range(1, 4))
    return Measured(
        {
            "steps": _whole_ns(pairs, plan) / MIB,
            "first_pair_steps": _whole_ns(pairs[:1], plan) / MIB,
            "plain_steps": min(max(load.layer_ns) for load in plain.loads) / MIB,
        }
    )


@claim(
    id="L5",
    judges="planner",
    setup="Llama-2-13B to 8 nodes over 400 Gbit/s",
    paper="< 1 s; up to 1.5 × as fast as NCCL",
    tolerance="< 1 s",
    ours="simulated {simulated_s:.3f} s, planned {predicted_s:.3f} s; {nccl_ratio:.2f} × NCCL",
    is_within=lambda f: max(f["simulated_s"], f["predicted_s"]) < 1,
    note="§7.3 lets 13B begin at 1.2 s with one source, after a multicast of less than 1 s",
)
def multicast_13b(conditions: Conditions) -> Measured:
    """λScale §1, §7.2. NCCL broadcasts in a chain, after its group is formed."""
    pipeline, _, chain = _multicasts(8, layers_of("llama-2-13b"))
    ours_s = pipeline.simulated_s
    return Measured(
        {
            "simulated_s": ours_s,
            "predicted_s": pipeline.predicted_s,
            "nccl_ratio": (chain.simulated_s + _SETUP_S) / ours_s,
        }
    )


@claim(
    id="L6",
    judges="planner",
    setup="7B, 13B, 70B to 4, 8, 12 nodes",
    paper="up to 1.82 × as fast as FaaSNet, 1.53 × as NCCL",
    tolerance="1.4 to 2.0 ×; 1.2 to 1.7 ×",
    ours="simulated up to {tree_max:.2f} × and {nccl_max:.2f} ×, planned up to"
    " {predicted_tree_max:.2f} × and {predicted_nccl_max:.2f} ×",
    is_within=lambda f: all(
        1.4 <= f[f"{way}tree_max"] <= 2.0 and 1.2 <= f[f"{way}nccl_max"] <= 1.7
        for way in ("", "predicted_")
    ),
    note="the paper's advantage grows with model and cluster; here it is largest on few nodes"
    " and, over NCCL, for small models, as a fixed group set-up (200 ms) explains it",
)
def multicast_speedups(conditions: Conditions) -> Measured:
    """λScale §7.2, Figure 7, with one source."""
    figures: dict[str, float] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    for model, nodes in itertools.product(_MODELS, _NODES):
        name = f"{model.removeprefix('llama-2-')}_{nodes}"
        pipeline, tree, chain = _multicasts(nodes, layers_of(model))
        over_tree = tree.simulated_s / pipeline.simulated_s
        over_nccl = (chain.simulated_s + _SETUP_S) / pipeline.simulated_s
        figures[f"tree_{name}"], figures[f"nccl_{name}"] = over_tree, over_nccl
        figures[f"predicted_tree_{name}"] = tree.predicted_s / pipeline.predicted_s
        figures[f"predicted_nccl_{name}"] = (chain.predicted_s + _SETUP_S) / pipeline.predicted_s
        lines.setdefault(f"{model}: over tree", []).append((nodes, over_tree))
        lines.setdefault(f"{model}: over NCCL", []).append((nodes, over_nccl))
    for peer in ("tree", "nccl", "predicted_tree", "predicted_nccl"):
        figures[f"{peer}_max"] = max(v for k, v in figures.items() if k.startswith(f"{peer}_"))
    curves = tuple(Curve(label, tuple(points)) for label, points in lines.items())
    picture = Picture("Multicast: how much faster the binomial pipeline is", "nodes", "×", curves)
    return Measured(figures, picture)


@claim(
    id="L7",
    judges="planner",
    setup="Llama-2-13B, arrivals of blocks on 4, 8, 12 nodes",
    paper="first and last blocks close on any cluster; NCCL's first waits for its group (up to"
    " hundreds of ms); FaaSNet's tail grows with the cluster",
    tolerance="direction",
    ours="from 4 to 12 nodes the pipeline's last block +{pipeline_growth_percent:.0f} %, the"
    " tree's +{tree_growth_percent:.3f} %; first block after {pipeline_first_s:.3f} s, NCCL's"
    " after {nccl_first_s:.3f} s",
    is_within=lambda f: (
        f["pipeline_growth_percent"] <= 15
        and f["tree_growth_percent"] > 0
        and f["tree_tail_s"] > f["pipeline_tail_s"]
        and f["nccl_first_s"] >= f["pipeline_first_s"] + 0.1
    ),
    note="our tree forwards chunks of 1 MiB while it receives, so that its tail is longer on"
    " every cluster but hardly grows",
)
def block_arrivals(conditions: Conditions) -> Measured:
    """λScale §7.2, Figure 8. Layers stand for blocks; times are those of the receiver that is
    complete last, simulated."""
    layers = layers_of("llama-2-13b")
    last: dict[tuple[str, int], list[float]] = {}
    for nodes in _NODES:
        for multicast in _multicasts(nodes, layers):
            slowest = max(multicast.arrivals_ns.values(), key=max)
            setup_s = _SETUP_S if multicast.strategy == "chain" else 0.0
            times = sorted(ns / NS_PER_S + setup_s for ns in slowest)
            last[multicast.strategy, nodes] = times
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
    return Measured(figures, picture)


@claim(
    id="L17",
    judges="planner",
    setup="Llama-2-13B to 8 nodes, 25 µs per block and step",
    paper="16 blocks are best, 8 and 24 to 48 worse",
    tolerance="12 to 24",
    ours="{best_blocks:.0f} blocks ({ms_at_best:.0f} ms; 16: {ms_at_16:.0f} ms); at 4 ms a block"
    " {best_blocks_slow:.0f}",
    is_within=lambda f: 12 <= f["best_blocks"] <= 24,
    note="the paper does not say what a block costs; 16 is best at about 4 ms a block, far"
    " above an RDMA message",
)
def best_block_count(conditions: Conditions) -> Measured:
    """λScale §7.5, Figure 18. A block costs a message over RDMA besides its bytes. The paper does
    not say what a block costs there; the cost with which 16 would be best follows from its own
    formula: b² = (log2 N - 1) · M / (B · cost)."""
    layers = layers_of("llama-2-13b")
    counts = (2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384)
    times = {b: _blocks_ns(8, b, layers, _RDMA_MESSAGE_NS) / 1e6 for b in counts}
    slow = {b: _blocks_ns(8, b, layers, _SLOW_BLOCK_NS) / 1e6 for b in counts}
    best = min(times, key=lambda b: times[b])
    wire_ms = sum(layers) / _NIC * 1e3
    figures = {
        "best_blocks": best,
        "ms_at_8": times[8],
        "ms_at_16": times[16],
        "ms_at_48": times[48],
        "ms_at_best": times[best],
        "best_blocks_slow": min(slow, key=lambda b: slow[b]),
        "cost_for_16_ms": 2 * wire_ms / 16**2,
    }
    curves = (
        Curve("25 µs a block", tuple(times.items())),
        Curve("4 ms a block", tuple(slow.items())),
    )
    picture = Picture("Llama-2-13B to 8 nodes", "blocks", "time (ms)", curves, is_log_x=True)
    return Measured(figures, picture)


# -- helpers, in the order used -------------------------------------------------------------------


def _steps(nodes: int, blocks: int) -> int:
    """Of the pipeline: b + ceil(log2 N) - 1."""
    return blocks + math.ceil(math.log2(nodes)) - 1


def _pipeline_ns(nodes: int, blocks: int, grid: ChunkGrid, rate: int) -> int:
    """The planner's prediction for nodes with NICs of `rate` bytes per second."""
    elements = [(WorkerRef(number),) for number in range(nodes)]
    plan = BinomialPlan(grid, elements[:1], elements[1:], blocks)
    ns = plan.predict(Fabric(single_nodes([rate] * nodes))).completed_ns
    assert ns is not None, "all rates are known"
    return ns


def _small_plan(sources: Sequence[int], targets: Sequence[int]) -> ScalePlan:
    """Figure 5's: four blocks (here layers of one chunk) that take a step of 1 MiB each."""
    topology = single_nodes([_BYTE_PER_NS] * 8)
    return Multicast(topology, (MIB,) * 4, sources, targets, "binomial").plan


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


def _multicasts(nodes: int, layers: Sequence[int]) -> list[Multicast]:
    """From one node to the others: by the binomial pipeline, FaaSNet's binary tree, and the chain
    of NCCL's broadcast."""
    topology = single_nodes([_NIC] * nodes)
    return [
        Multicast(topology, layers, [0], range(1, nodes), strategy)
        for strategy in ("binomial", "tree", "chain")
    ]


def _blocks_ns(nodes: int, blocks: int, layers: Sequence[int], block_ns: int) -> float:
    """The pipeline's time with so many blocks, each of which costs `block_ns` in every step."""
    ns = _pipeline_ns(nodes, blocks, ChunkGrid(layers, MIB), _NIC)
    return ns + _steps(nodes, blocks) * block_ns


def _distribution(times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Points of a cumulative distribution."""
    yield 0.0, 0.0
    for number, time in enumerate(times, 1):
        yield time, number / len(times)
