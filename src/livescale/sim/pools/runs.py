"""One pool under one load, from the load's start on: the run and what it took.

A simulated pool begins empty, as a real one does; the load begins when the first instances and
host copies can be there, and times count from that moment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from livescale.config.slo import RequestTiming
from livescale.load.traces import TraceRow
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.simulate import simulate
from livescale.telemetry.history.reading import History, read_history
from livescale.telemetry.record.record import AnyLine, read_record
from livescale.values.copy_strategies import AllCopies, NoCopies
from livescale.values.types import Outcome
from livescale.values.units import NS_PER_S

Loads = Mapping[str, Sequence[TraceRow]]
_Played = TypeVar("_Played")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class PoolRun:
    """What came of a load. Times of `result` are the world's; the load began at `started_ns`."""

    config: SimConfig
    result: SimResult
    started_ns: int

    @property
    def ended_ns(self) -> int:
        """When the last request ended."""
        return max((r.finished_ns for r in self.result.requests), default=self.started_ns)

    @property
    def failed(self) -> int:
        """Requests that did not get all their tokens."""
        return sum(r.outcome is not Outcome.FINISHED for r in self.result.requests)

    def timings(self) -> list[RequestTiming]:
        """Of all requests, in the order of their ends."""
        return [line.timing() for line in self.result.requests]

    def loads_from(self) -> dict[str, int]:
        """Where ranks of new instances got their parameters since the load began: how many from
        "devices", "host_memory" and "storage" (a per-host cache's misses); "spares" had them."""
        counts = {"devices": 0, "host_memory": 0, "storage": 0, "spares": 0}
        for line in self.result.scales:
            for load in line.loads if line.decided_ns >= self.started_ns else ():
                counts[_place(load.upstream)] += 1
        return counts

    def device_ns(self, model: str | None = None) -> int:
        """How long instances (of one model, or of all) held devices while there were requests,
        loading included."""
        sizes = {policy.spec.name: policy.spec.tp_size for policy in self.config.policies}
        held: dict[str, int] = {}
        total, last_ns, stop_ns = 0, self.started_ns, self.ended_ns
        for count in self.result.instances:
            if model not in (None, count.model):
                continue
            at_ns = min(max(count.now_ns, self.started_ns), stop_ns)
            total += sum(held.values()) * (at_ns - last_ns)
            last_ns = at_ns
            held[count.model] = count.living * sizes[count.model]
        return total + sum(held.values()) * (stop_ns - last_ns)


def run_pool(
    config: SimConfig,
    loads: Loads,
    lead_ns: int,
    seed: int,
    record_file: IO[bytes] | None = None,
) -> PoolRun:
    """Play loads by model, `lead_ns` after the pool began."""
    shifted = {
        model: [row.at(row.arrival_ns + lead_ns) for row in rows] for model, rows in loads.items()
    }
    return PoolRun(config, simulate(shifted, config, seed, record_file), lead_ns)


def run_with_history(
    config: SimConfig, loads: Loads, lead_ns: int, seed: int
) -> tuple[PoolRun, History]:
    """The same, and what its run record says; the record is not kept."""
    return recorded(lambda file: run_pool(config, loads, lead_ns, seed, file), read_history)


def recorded(
    play: Callable[[IO[bytes]], _Played], read: Callable[[Iterable[AnyLine]], _Found]
) -> tuple[_Played, _Found]:
    """What a simulation gives that writes its run record, and what is read in the record, which is
    not kept."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        played = play(file)
        file.flush()
        return played, read(read_record(Path(file.name)))


def lead_ns(config: SimConfig) -> int:
    """By then the first instances and host copies can have been read from storage.

    An upper bound: as if all that a host is to hold, and one more instance, went through its
    storage one after the other, and then a rank at the rate of a single device; and a quarter
    more.
    """
    controller = config.controller
    hosts = max(len(config.hosts), 1)
    copies = 1
    if isinstance(controller.placement, AllCopies):
        copies = hosts
    elif isinstance(controller.placement, NoCopies):
        copies = 0
    sizes = {p.spec.name: p.spec.size_bytes * p.spec.tp_size for p in controller.models}
    held_bytes = sum(
        sizes[policy.spec.name] * (policy.instances_min + copies) for policy in controller.models
    )
    rates = [host.storage_bytes_per_s for host in config.hosts]
    if config.hosts and all(rates):
        held_bytes = -(-held_bytes // hosts)
    else:
        rates = [controller.remote_storage_bytes_per_s]
    held_bytes += max(sizes.values())
    rank_bytes = max(policy.spec.size_bytes for policy in controller.models)
    own_rates = [device.storage_bytes_per_s for device in config.devices]
    read_ns = _slowest_ns(held_bytes, rates) + _slowest_ns(rank_bytes, own_rates)
    return controller.settle_ns + read_ns * 5 // 4


def _place(upstream: str) -> str:
    if upstream in ("storage", "spare"):
        return "storage" if upstream == "storage" else "spares"
    return "host_memory" if upstream.startswith("h") else "devices"


def _slowest_ns(amount_bytes: int, rates: Iterable[int | None]) -> int:
    slowest = min((rate for rate in rates if rate), default=None)
    return 0 if slowest is None else -(-amount_bytes * NS_PER_S // slowest)


def token_weights(loads: Loads) -> dict[str, int]:
    """Tokens that are asked of each model: what placements weigh models by."""
    return {
        model: sum(row.input_tokens + row.output_tokens for row in rows)
        for model, rows in loads.items()
    }


def fit_rows(rows: Sequence[TraceRow], tokens_max: int) -> tuple[list[TraceRow], int]:
    """Rows that an instance can serve, and how many had to be shortened.

    An answer gets at most half of `tokens_max`, its prompt what the answer leaves.
    """
    fitted = []
    for row in rows:
        output = min(row.output_tokens, max(tokens_max // 2, 1))
        fitted.append(TraceRow(row.arrival_ns, min(row.input_tokens, tokens_max - output), output))
    return fitted, sum(new != old for new, old in zip(fitted, rows, strict=True))
