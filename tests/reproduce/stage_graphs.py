"""Graphs of stages with several replicas each (QUART §4: a pipeline is a graph without cycles).

A queueing world beside `stage_lines.py`, of which a line is the special case: a request goes from a
stage to all of its followers, and comes to a stage when all that stand before it are done with it.
Stages that none stands before get the arrivals. First come, first served; no loads, no batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from livescale.control.stages.formulas.graph import StageGraph

Times = NDArray[np.float64]


@dataclass(frozen=True)
class GraphRun:
    """What requests did in a graph: per stage, and request in the order of their arrivals, when it
    `comes` there, `begins` to be served and `leaves`. All in the unit of the arrivals."""

    comes: tuple[Times, ...]
    begins: tuple[Times, ...]
    leaves: tuple[Times, ...]

    @property
    def waits(self) -> tuple[float, ...]:
        """Mean time before each stage."""
        pairs = zip(self.begins, self.comes, strict=True)
        return tuple(float((begins - comes).mean()) for begins, comes in pairs)

    @property
    def ends(self) -> Times:
        """When requests are through: all stages are done with them."""
        ends: Times = np.max(self.leaves, axis=0)
        return ends

    def arrival_cv(self, stage: int) -> float:
        """Of the gaps between requests that come to a stage."""
        gaps = np.diff(np.sort(self.comes[stage]))
        return float(gaps.std() / gaps.mean())


def play_graph(
    arrivals: Times, graph: StageGraph, services: Sequence[Times | float], replicas: Sequence[int]
) -> GraphRun:
    """Plays requests that arrive at these times (in order) through the stages.

    `services[i]` are the service times at stage `i`, in the order in which requests begin there, or
    one number for all. `replicas[i]` serve there, each one request at a time.
    """
    comes: list[Times] = []
    begins: list[Times] = []
    leaves: list[Times] = []
    for stage, (service, servers) in enumerate(zip(services, replicas, strict=True)):
        before = graph.before(stage)
        comes.append(np.max([leaves[i] for i in before], axis=0) if before else arrivals)
        times = np.broadcast_to(service, arrivals.shape)
        begun, left = _served(comes[-1], times, servers)
        begins.append(begun)
        leaves.append(left)
    return GraphRun(tuple(comes), tuple(begins), tuple(leaves))


def _served(comes: Times, services: Times, servers: int) -> tuple[Times, Times]:
    """By request: when it begins and leaves. Those that come at once keep their order."""
    free = [0.0] * servers
    begins, leaves = np.empty_like(comes), np.empty_like(comes)
    order = np.argsort(comes, kind="stable").tolist()
    for request, service in zip(order, services.tolist(), strict=True):
        begins[request] = begin = max(float(comes[request]), free[0])
        leaves[request] = begin + service
        heapq.heapreplace(free, begin + service)
    return begins, leaves
