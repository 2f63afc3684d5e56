"""`bench hosts`: how long many hosts take to join a pool, all at once.

Real ones are `livescale join` of this machine, each with an agent and a timed worker, beside a
`livescale serve` without devices; simulated ones are in `simulated_hosts.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from livescale.engine.files.make import make_model
from livescale.lab.bench.base.machine import used_cpu_s
from livescale.lab.bench.hosts.joined_pool import HEAD, JoinedPool
from livescale.lab.bench.hosts.simulated_hosts import SimulatedJoins, join_simulated
from livescale.telemetry.record_watch import RecordWatch
from livescale.values.units import NS_PER_S

_START_S = 60.0
# Small: what they hold is not the question.
_SIZES = ("--arena-bytes", "8MiB", "--kv-bytes", "8MiB", "--host-memory-bytes", "64MiB")


@dataclass(frozen=True, slots=True)
class HostsBenchOptions:
    """How many of each kind (0: none), and how long real ones may take."""

    real: int = 32
    simulated: int = 64
    patience_s: float = 180.0


@dataclass(frozen=True, slots=True)
class RealJoins:
    """`joined_ns` is by host, from its own `join` to its worker in the pool; `all_ns` is from the
    first `join` to the last worker. CPU seconds are until then, of each host's processes and the
    head's."""

    joined_ns: dict[str, int]
    all_ns: int
    host_cpu_s: dict[str, float]
    head_cpu_s: float

    def as_json(self) -> dict[str, object]:
        return {
            "hosts": len(self.joined_ns),
            "all_joined_s": self.all_ns / NS_PER_S,
            "slowest_s": max(self.joined_ns.values()) / NS_PER_S,
            "median_s": median(self.joined_ns.values()) / NS_PER_S,
            "fastest_s": min(self.joined_ns.values()) / NS_PER_S,
            "cpu_s_per_host": median(self.host_cpu_s.values()),
            "cpu_s_hosts": sum(self.host_cpu_s.values()),
            "cpu_s_head": self.head_cpu_s,
        }

    def text(self) -> str:
        slowest = max(self.joined_ns, key=lambda host: self.joined_ns[host])
        return (
            f"{len(self.joined_ns)} real hosts: all joined {self.all_ns / NS_PER_S:.1f} s after"
            f" the first command; slowest {self.joined_ns[slowest] / NS_PER_S:.1f} s ({slowest}),"
            f" median {median(self.joined_ns.values()) / NS_PER_S:.1f} s;"
            f" {median(self.host_cpu_s.values()):.2f} CPU-s each,"
            f" {self.head_cpu_s:.2f} of the head"
        )


@dataclass(frozen=True, slots=True)
class HostsReport:
    """What was asked for."""

    real: RealJoins | None
    simulated: SimulatedJoins | None

    def as_json(self) -> dict[str, object]:
        found = {"real": self.real, "simulated": self.simulated}
        return {name: part.as_json() for name, part in found.items() if part is not None}

    def text(self) -> str:
        return "\n".join(part.text() for part in (self.real, self.simulated) if part is not None)


def run_hosts(options: HostsBenchOptions, say: Callable[[str], None]) -> HostsReport:
    """Real hosts first. Raises UserError, which names the host that does not come, and says its
    last words."""
    real = simulated = None
    if options.real:
        with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
            real = _join_real(Path(scratch), options, say)
    if options.simulated:
        say(f"{options.simulated} simulated hosts …")
        simulated = join_simulated(options.simulated)
    return HostsReport(real, simulated)


# -- helpers, in the order used -------------------------------------------------------------------


def _join_real(folder: Path, options: HostsBenchOptions, say: Callable[[str], None]) -> RealJoins:
    model, record = folder / "timed", folder / "record.jsonl"
    make_model(model, "tiny")
    names = [f"host{number}" for number in range(options.real)]
    watch = RecordWatch(record)

    def missing() -> list[str]:
        watch.read()
        if not watch.lives:
            return [HEAD]
        return [name for name in names if name in pool.commands and name not in watch.joined_ns]

    with JoinedPool(folder) as pool:
        words = (str(model), "--record", str(record), "--device", "timed", *_SIZES)
        address = pool.begin_head(*words)
        pool.until(missing, _START_S)
        say(f"{len(names)} hosts join {address} …")
        for name in names:
            pool.begin_host(name)
        pool.until(missing, options.patience_s)
        used_s = {name: used_cpu_s(of.process.pid) for name, of in pool.commands.items()}
    head_cpu_s = used_s.pop(HEAD)
    began_ns = {name: pool.commands[name].started_ns for name in names}
    return RealJoins(
        joined_ns={name: watch.joined_ns[name] - began_ns[name] for name in names},
        all_ns=max(watch.joined_ns[name] for name in names) - min(began_ns.values()),
        host_cpu_s=used_s,
        head_cpu_s=head_cpu_s,
    )
