"""`bench multicast`: every strategy on emulated links, beside a TCP stream and gloo, in one run.

Plans are made by the planner that the controller uses; workers are an arena and a data plane in a
process of their own, one per device, in their host's network namespace.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from livescale.bench.errors import BenchError
from livescale.bench.line_process import LineProcess
from livescale.bench.multicast_peers import gloo_seconds, stream_seconds
from livescale.bench.multicast_report import MulticastReport, MulticastRow, MulticastRun
from livescale.chunks import senders as chunk_senders
from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.interpreter import module_words
from livescale.plans import ScalePlan
from livescale.testbed.bed import Testbed
from livescale.testbed.spec import NetworkSpec
from livescale.types import Manifest, WorkerRef, agent_ref

_START_S = 120.0
_ROUND_S = 600.0
# Between processes that share memory: what a prediction needs to know is that it is no limit.
_GROUP_BYTES_PER_S = 2_000_000_000
_MODEL, _OTHER_MODEL = "model", "other"
_HOST_STRATEGY, _HOST_COPY = "host", agent_ref(0)


@dataclass(frozen=True, slots=True)
class MulticastBenchOptions:
    """What is run: each strategy to 1, 2, … of the hosts after the first, which has the copy."""

    network: NetworkSpec
    strategies: tuple[str, ...]
    receiver_hosts: tuple[int, ...]
    size_bytes: int = 256 << 20
    layers: int = 32
    chunk_bytes: int = 512 << 10
    repetitions: int = 3
    has_gloo: bool = True
    is_both_ways: bool = True


def run_multicast(options: MulticastBenchOptions, say: Callable[[str], None]) -> MulticastReport:
    """Measure everything, one transfer at a time. Raises BenchError and TestbedError."""
    per_host = options.network.devices_per_host
    with Testbed(options.network) as testbed:
        say(f"  {options.network.hosts} hosts are up")
        stream_s = stream_seconds(testbed, options.size_bytes, options.repetitions)
        gloo_s = {}
        if options.has_gloo:
            receivers = [hosts * per_host for hosts in options.receiver_hosts]
            gloo_s = gloo_seconds(testbed, options.size_bytes, receivers, 1)
            say("  gloo is done")
        with _Fleet(testbed, options) as fleet:
            rows = []
            for strategy in options.strategies:
                rows += [fleet.row(strategy, hosts) for hosts in options.receiver_hosts]
                say(f"  {strategy} is done")
            both_ways = fleet.both_ways() if options.is_both_ways else ()
    network = msgspec.structs.asdict(options.network)
    network["spine_bits_per_s"] = options.network.leaf_bits_per_s
    return MulticastReport(tuple(rows), network, stream_s, gloo_s, both_ways)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A model and where it lies in every arena."""

    manifest: Manifest
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes


class _Fleet:
    """The workers of a testbed, all introduced to each other. Use as a context."""

    def __init__(self, testbed: Testbed, options: MulticastBenchOptions) -> None:
        self._testbed = testbed
        self._options = options
        self._topology = testbed.topology(group_bytes_per_s=_GROUP_BYTES_PER_S)
        self._plans = 0
        self._stack = ExitStack()
        self._workers: dict[WorkerRef, LineProcess] = {}
        self._connect_ns = 0

    def __enter__(self) -> _Fleet:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, strategy: str, hosts: int) -> MulticastRow:
        """The first host's copies to all devices of the next `hosts` hosts."""
        per_host = self._options.network.devices_per_host
        refs = sorted(self._topology.devices)
        sources, targets = refs[:per_host], refs[per_host : per_host * (hosts + 1)]
        if strategy == _HOST_STRATEGY:
            sources = [_HOST_COPY]
        runs, plan = [], None
        for _ in range(self._options.repetitions):
            began_ns = time.monotonic_ns()
            plan = self._plan(self._copy, sources, targets, strategy)
            runs.append(self._measured([(plan, self._copy, began_ns)])[0])
        assert plan is not None
        return self._row(strategy, plan, runs)

    def both_ways(self) -> tuple[MulticastRow, ...]:
        """A chain to all hosts while another model goes from its end to its source.

        The source's downlink and the last receiver's uplink are free, so neither should notice.
        """
        refs = sorted(self._topology.devices)
        source, targets = refs[0], refs[1:]
        tail = _tail(self._plan(self._copy, [source], targets, "chain"))
        other = self._made(tail, _OTHER_MODEL, self._copy.size_bytes)
        there: list[MulticastRun] = []
        back: list[MulticastRun] = []
        plans: list[ScalePlan] = []
        for _ in range(self._options.repetitions):
            began_ns = time.monotonic_ns()
            plans = [
                self._plan(self._copy, [source], targets, "chain"),
                self._plan(other, [tail], [source], "chain"),
            ]
            pairs = zip(plans, (self._copy, other), strict=True)
            measured = self._measured([(plan, copy, began_ns) for plan, copy in pairs])
            there.append(measured[0])
            back.append(measured[1])
        return (
            self._row("chain, both ways", plans[0], there),
            self._row("the other way", plans[1], back),
        )

    # -- helpers, in the order used ---------------------------------------------------------------

    def _start(self) -> None:
        settings = self._spawned()
        register_ns = max(found["register_ns"] for found in settings.values())
        peers = {
            ref: [ref.worker, found["address"], found["port"], found["shm_path"]]
            for ref, found in settings.items()
        }
        # What one hop would add if it had to be opened for a transfer.
        first = dict(list(peers.items())[:2])
        self._connect_ns = self._introduced(first) + register_ns
        self._introduced(peers)
        # Every device of the first host holds the model, and so does the host itself.
        holders = sorted(self._topology.devices)[: self._options.network.devices_per_host]
        holders += [_HOST_COPY] if _HOST_COPY in self._workers else []
        for ref in holders:
            self._copy = self._made(ref, _MODEL, 0)

    def _spawned(self) -> dict[WorkerRef, dict[str, Any]]:
        """Start the workers, all at once; where each can be reached."""
        options = self._options
        shm = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="livescale-shm-"))
        models = 2 if options.is_both_ways else 1
        members = sorted(self._topology.devices)
        members += [_HOST_COPY] if _HOST_STRATEGY in options.strategies else []
        for ref in members:
            host = self._testbed.host_of(ref)
            words = module_words("livescale.bench.multicast_worker")
            process = self._stack.enter_context(
                LineProcess(f"worker {ref}", [*self._testbed.inside(host.name), *words], {})
            )
            process.send(
                {
                    "worker": ref.worker,
                    "host": host.name,
                    "address": self._testbed.address_of(ref),
                    "arena_bytes": models * (options.size_bytes + (options.layers << 12)),
                    "shm_directory": shm,
                    "eager_peers_max": len(members),
                }
            )
            self._workers[ref] = process
        return {
            ref: json.loads(process.receive(_START_S)["settings"])
            for ref, process in self._workers.items()
        }

    def _introduced(self, peers: dict[WorkerRef, list[object]]) -> int:
        """These workers know and have connected to each other; ns that it took."""
        began_ns = time.monotonic_ns()
        for ref in peers:
            others = [peer for other, peer in peers.items() if other != ref]
            self._workers[ref].send({"do": "introduce", "peers": others})
            self._workers[ref].send(
                {"do": "connected", "peers": len(others), "wait_s": _START_S / 2}
            )
        answers = []
        for ref in peers:
            self._workers[ref].receive(_START_S)
            answers.append(self._workers[ref].receive(_START_S))
        if any(answer["peers"] < len(peers) - 1 for answer in answers):
            raise BenchError("some workers cannot connect to each other")
        ended_ns: int = max(answer["at_ns"] for answer in answers)
        return ended_ns - began_ns

    def _made(self, ref: WorkerRef, model: str, offset_bytes: int) -> _Copy:
        order = {
            "do": "make",
            "model": model,
            "layers": self._options.layers,
            "size_bytes": self._options.size_bytes,
            "offset_bytes": offset_bytes,
            "seed": offset_bytes,
        }
        answer = self._workers[ref].ask(order, _START_S)
        return _Copy(msgspec.convert(answer["manifest"], Manifest), offset_bytes)

    def _plan(
        self, copy: _Copy, sources: list[WorkerRef], targets: list[WorkerRef], strategy: str
    ) -> ScalePlan:
        self._plans += 1
        request = PlanRequest(
            plan=self._plans,
            model=copy.manifest.model,
            layer_bytes=tuple(entry.size_bytes for entry in copy.manifest.layers),
            chunk_bytes=self._options.chunk_bytes,
            instances=len(targets),
            sources=tuple(Source((ref,)) for ref in sources),
            targets=tuple((ref,) for ref in targets),
            has_storage=False,
        )
        return make_plan(request, self._topology, strategy)

    def _measured(self, orders: list[tuple[ScalePlan, _Copy, int]]) -> list[MulticastRun]:
        """Run plans at once; each with the time before it was made."""
        planned_ns = time.monotonic_ns()
        used_s, crossed_bytes = self._cpu_s(), self._testbed.spine_bytes()
        measuring_ns = time.monotonic_ns() - planned_ns
        for plan, copy, _ in orders:
            for receiver, order in self._orders(plan, copy):
                self._workers[receiver].send(order)
        for plan, _, _ in orders:
            for load in plan.loads:
                self._workers[load.receiver].receive(_ROUND_S)
        answers = [list(self._answers(plan)) for plan, _, _ in orders]
        cpu_s = (self._cpu_s() - used_s) / len(orders)
        spine_bytes = (self._testbed.spine_bytes() - crossed_bytes) // len(orders)
        for plan, copy, _ in orders:
            self._drop(plan, copy)
        runs = []
        for (_, copy, began_ns), answered in zip(orders, answers, strict=True):
            # Looking at the counters is no part of a scale-up.
            start_ns = began_ns + measuring_ns
            layers = range(len(copy.manifest.layers))
            runs.append(
                MulticastRun(
                    plan_ns=planned_ns - began_ns,
                    start_ns=min(answer["first_byte_ns"] for answer in answered) - start_ns,
                    completed_ns=max(answer["completed_ns"] for answer in answered) - start_ns,
                    layer_ns=tuple(
                        max(answer["layer_ns"][str(layer)] for answer in answered) - start_ns
                        for layer in layers
                    ),
                    cpu_s=cpu_s,
                    spine_bytes=spine_bytes,
                )
            )
        return runs

    def _orders(self, plan: ScalePlan, copy: _Copy) -> Iterator[tuple[WorkerRef, dict[str, Any]]]:
        manifest = msgspec.to_builtins(copy.manifest)
        for load in plan.loads:
            yield (
                load.receiver,
                {
                    "do": "receive",
                    "plan": plan.plan,
                    "manifest": manifest,
                    "chunk_bytes": plan.chunk_bytes,
                    "feeds": msgspec.to_builtins(load.feeds),
                    "offset_bytes": copy.offset_bytes,
                },
            )

    def _answers(self, plan: ScalePlan) -> Iterator[dict[str, Any]]:
        for load in plan.loads:
            process = self._workers[load.receiver]
            answer = process.ask({"do": "wait", "plan": plan.plan}, _ROUND_S)
            if answer["failures"]:
                raise BenchError(f"{plan}: {load.receiver}: {'; '.join(answer['failures'])}")
            yield answer

    def _drop(self, plan: ScalePlan, copy: _Copy) -> None:
        order = {
            "do": "drop",
            "manifest": msgspec.to_builtins(copy.manifest),
            "offset_bytes": copy.offset_bytes,
            "size_bytes": copy.size_bytes,
        }
        for load in plan.loads:
            self._workers[load.receiver].ask(order, _START_S)

    def _cpu_s(self) -> float:
        used_s = [w.ask({"do": "usage"}, _START_S)["cpu_s"] for w in self._workers.values()]
        return float(sum(used_s))

    def _row(self, strategy: str, plan: ScalePlan, runs: list[MulticastRun]) -> MulticastRow:
        return MulticastRow(
            strategy=strategy,
            planned=plan.strategy,
            receivers=plan.receivers,
            size_bytes=plan.bytes_per_target,
            link_bits_per_s=self._options.network.link_bits_per_s,
            connect_ns=self._connect_ns,
            predicted_ns=plan.predicted_ns,
            runs=tuple(runs),
        )


def _tail(chain: ScalePlan) -> WorkerRef:
    """The receiver that no other reads from."""
    senders = {upstream.worker for load in chain.loads for upstream in chunk_senders(load.feeds)}
    return next(load.receiver for load in chain.loads if load.receiver not in senders)
