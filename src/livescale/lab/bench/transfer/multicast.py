"""`bench multicast`: every strategy on emulated links, beside a TCP stream and gloo, in one run.

Plans are made by the planner that the controller uses; workers are an arena and a data plane in a
process of their own, one per device, in their host's network namespace.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from livescale.control.multicast.planner import make_plan
from livescale.control.multicast.request import PlanRequest, Source
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.transfer.mesh import introduce
from livescale.lab.bench.transfer.multicast_peers import gloo_seconds, stream_seconds
from livescale.lab.bench.transfer.multicast_report import (
    MulticastReport,
    MulticastRow,
    MulticastRun,
)
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec
from livescale.messages.scale_plan import ScalePlan
from livescale.transfer.formats.orders import ContentChecks, ReceiveOrder
from livescale.values.chunks import senders as chunk_senders
from livescale.values.types import Manifest, WorkerRef, agent_ref

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
            gloo_s = gloo_seconds(testbed, options.size_bytes, receivers)
            say("  gloo is done")
        with ExitStack() as stack:
            fleet = TransferFleet(testbed, options, stack)
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


class _Transfer(NamedTuple):
    """A plan, and the model that it moves."""

    plan: ScalePlan
    copy: _Copy


@dataclass(frozen=True, slots=True)
class DataPlaneMode:
    """How the workers of a fleet protect what they send. With `tls_dirs`, one for each host, there
    are certificates; then `seals` says whether parameters are encrypted."""

    content_checks: ContentChecks = ContentChecks.NONE
    tls_dirs: Mapping[str, Path] | None = None
    seals: bool = False

    def job(self, host: str) -> dict[str, object]:
        """What a worker of this host is told."""
        if self.tls_dirs is None:
            return {}
        return {"tls_dir": str(self.tls_dirs[host]), "seals": self.seals}


class TransferFleet:
    """The workers of a testbed, all introduced to each other. They end with the stack."""

    def __init__(
        self,
        testbed: Testbed,
        options: MulticastBenchOptions,
        stack: ExitStack,
        mode: DataPlaneMode | None = None,
    ) -> None:
        self._testbed = testbed
        self._options = options
        self._mode = mode or DataPlaneMode()
        self._topology = testbed.topology(group_bytes_per_s=_GROUP_BYTES_PER_S)
        self._plans = 0
        self._workers: dict[WorkerRef, LineProcess] = {}
        settings = self._spawned(stack)
        register_ns = max(found["register_ns"] for found in settings.values())
        peers = [
            [ref.worker, found["address"], found["port"], found["shm_path"]]
            for ref, found in settings.items()
        ]
        workers = list(self._workers.values())
        # What one hop would add if it had to be opened for a transfer.
        self._connect_ns = introduce(workers[:2], peers[:2], [1, 1])[0] + register_ns
        introduce(workers, peers, [len(workers) - 1] * len(workers))
        # Every device of the first host holds the model, and so does the host itself.
        holders = sorted(self._topology.devices)[: options.network.devices_per_host]
        holders += [_HOST_COPY] if _HOST_COPY in self._workers else []
        for ref in holders:
            self._copy = self._made(ref, _MODEL, 0)

    def row(self, strategy: str, hosts: int) -> MulticastRow:
        """The first host's copies to all devices of the next `hosts` hosts."""
        (row,) = self._rows({strategy: lambda: self._to_hosts(strategy, hosts)})
        return row

    def once(self, strategy: str, hosts: int) -> MulticastRun:
        """The same, one transfer."""
        began_ns = time.monotonic_ns()
        (run,) = self._measured([self._to_hosts(strategy, hosts)], began_ns)
        return run

    def both_ways(self) -> tuple[MulticastRow, ...]:
        """A chain to all hosts while another model goes from its end to its source.

        The source's downlink and the last receiver's uplink are free, so neither should notice.
        """
        refs = sorted(self._topology.devices)
        source, targets = refs[0], refs[1:]
        tail = _tail(self._order(self._copy, [source], targets, "chain").plan)
        other = self._made(tail, _OTHER_MODEL, self._copy.manifest.size_bytes)
        return self._rows(
            {
                "chain, both ways": lambda: self._order(self._copy, [source], targets, "chain"),
                "the other way": lambda: self._order(other, [tail], [source], "chain"),
            }
        )

    # -- helpers, in the order used ---------------------------------------------------------------

    def _to_hosts(self, strategy: str, hosts: int) -> _Transfer:
        per_host = self._options.network.devices_per_host
        refs = sorted(self._topology.devices)
        sources, targets = refs[:per_host], refs[per_host : per_host * (hosts + 1)]
        if strategy == _HOST_STRATEGY:
            sources = [_HOST_COPY]
        return self._order(self._copy, sources, targets, strategy)

    def _spawned(self, stack: ExitStack) -> dict[WorkerRef, dict[str, Any]]:
        """Start the workers, all at once; where each can be reached."""
        options = self._options
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="livescale-shm-"))
        models = 2 if options.is_both_ways else 1
        members = sorted(self._topology.devices)
        members += [_HOST_COPY] if _HOST_STRATEGY in options.strategies else []
        for ref in members:
            host = self._testbed.host_of(ref)
            inside = self._testbed.inside(host.name)
            process = stack.enter_context(
                bench_process(f"worker {ref}", "transfer.multicast_worker", before=inside)
            )
            process.send(
                {
                    "worker": ref.worker,
                    "host": host.name,
                    "address": self._testbed.address_of(ref),
                    "arena_bytes": models * (options.size_bytes + (options.layers << 12)),
                    "shm_directory": shm,
                    "eager_peers_max": len(members),
                    **self._mode.job(host.name),
                }
            )
            self._workers[ref] = process
        return {ref: of.receive(_START_S)["settings"] for ref, of in self._workers.items()}

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

    def _order(
        self, copy: _Copy, sources: list[WorkerRef], targets: list[WorkerRef], strategy: str
    ) -> _Transfer:
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
        return _Transfer(make_plan(request, self._topology, strategy), copy)

    def _rows(self, planned: dict[str, Callable[[], _Transfer]]) -> tuple[MulticastRow, ...]:
        """Transfers that are planned and run at once, again and again: a row for each, by name."""
        transfers: list[_Transfer] = []
        runs = []
        for _ in range(self._options.repetitions):
            began_ns = time.monotonic_ns()
            transfers = [plan() for plan in planned.values()]
            runs.append(self._measured(transfers, began_ns))
        return tuple(
            MulticastRow(
                strategy=name,
                planned=plan.strategy,
                receivers=plan.receivers,
                size_bytes=plan.bytes_per_target,
                link_bits_per_s=self._options.network.link_bits_per_s,
                connect_ns=self._connect_ns,
                predicted_ns=plan.predicted_ns,
                runs=own,
            )
            for name, (plan, _), own in zip(
                planned, transfers, zip(*runs, strict=True), strict=True
            )
        )

    def _measured(self, transfers: list[_Transfer], began_ns: int) -> list[MulticastRun]:
        """Run transfers at once, whose planning began then."""
        planned_ns = time.monotonic_ns()
        used_s, crossed_bytes = self._cpu_s(), self._testbed.spine_bytes()
        measuring_ns = time.monotonic_ns() - planned_ns
        for plan, copy in transfers:
            for load in plan.loads:
                order = ReceiveOrder(
                    plan=plan.plan,
                    manifest=copy.manifest,
                    chunk_bytes=plan.chunk_bytes,
                    feeds=load.feeds,
                    offset_bytes=copy.offset_bytes,
                    content_checks=self._mode.content_checks,
                )
                told = {"do": "receive", "order": msgspec.to_builtins(order)}
                self._workers[load.receiver].send(told)
        for plan, _ in transfers:
            for load in plan.loads:
                self._workers[load.receiver].receive(_ROUND_S)
        answers = [list(self._answers(plan)) for plan, _ in transfers]
        cpu_s = (self._cpu_s() - used_s) / len(transfers)
        spine_bytes = (self._testbed.spine_bytes() - crossed_bytes) // len(transfers)
        for plan, copy in transfers:
            self._drop(plan, copy)
        # Looking at the counters is no part of a scale-up.
        start_ns = began_ns + measuring_ns
        return [
            MulticastRun(
                plan_ns=planned_ns - began_ns,
                start_ns=min(answer["first_byte_ns"] for answer in answered) - start_ns,
                completed_ns=max(answer["completed_ns"] for answer in answered) - start_ns,
                layer_ns=tuple(
                    max(answer["layer_ns"][str(layer)] for answer in answered) - start_ns
                    for layer in range(len(copy.manifest.layers))
                ),
                cpu_s=cpu_s,
                spine_bytes=spine_bytes,
            )
            for (_, copy), answered in zip(transfers, answers, strict=True)
        ]

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
            "size_bytes": copy.manifest.size_bytes,
        }
        for load in plan.loads:
            self._workers[load.receiver].ask(order, _START_S)

    def _cpu_s(self) -> float:
        used_s = [w.ask({"do": "usage"}, _START_S)["cpu_s"] for w in self._workers.values()]
        return float(sum(used_s))


def _tail(chain: ScalePlan) -> WorkerRef:
    """The receiver that no other reads from."""
    senders = {upstream.worker for load in chain.loads for upstream in chunk_senders(load.feeds)}
    return next(load.receiver for load in chain.loads if load.receiver not in senders)
