"""`bench multicast --tls`: what the modes of `data_plane_tls` cost, in turns.

Each mode has workers of its own, which wait while those of another one transfer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from livescale.lab.bench.transfer.multicast import (
    DataPlaneMode,
    MulticastBenchOptions,
    TransferFleet,
)
from livescale.lab.bench.transfer.multicast_report import MulticastRun
from livescale.lab.testbed.bed import Testbed
from livescale.report.run.terminal import table
from livescale.runtime.join.cluster_folder import ClusterFolder
from livescale.transfer.formats.orders import ContentChecks

UNCHECKED, PLAIN, OFF, ON = "unchecked", "plain", "off", "on"
"""Checksums only, as `bench multicast` else; a pool without certificates, which compares SHA-256,
too; and pools with certificates by their `data_plane_tls` (between machines `auto` is `on`)."""


@dataclass(frozen=True, slots=True)
class TlsReport:
    """Transfers by mode: the n-th of all modes followed one another."""

    strategy: str
    receivers: int
    size_bytes: int
    network: Mapping[str, int]
    runs: Mapping[str, Sequence[MulticastRun]]

    def seconds(self, mode: str) -> list[float]:
        return [run.completed_ns / 1e9 for run in self.runs[mode]]

    def cpu_s_per_gb(self, mode: str) -> list[float]:
        """CPU seconds of all workers, sender and receivers, over what was received."""
        received = self.size_bytes * self.receivers / 1e9
        return [run.cpu_s / received for run in self.runs[mode]]

    def as_json(self) -> dict[str, object]:
        return {
            "strategy": self.strategy,
            "receivers": self.receivers,
            "bytes": self.size_bytes,
            **self.network,
            "modes": {mode: self._figures(mode) for mode in self.runs},
        }

    def text(self) -> str:
        header = ["mode", "seconds", "over plain", "(all)", "CPU s/GB", "over plain", "(all)"]
        rows: list[list[object]] = [
            [mode, *self._cells(self.seconds, mode), *self._cells(self.cpu_s_per_gb, mode)]
            for mode in self.runs
        ]
        told = f"{self.strategy} to {self.receivers} receivers, {self.size_bytes / 1e6:.0f} MB each"
        return f"{told}\n{table(header, rows)}"

    def _figures(self, mode: str) -> dict[str, object]:
        return {
            "seconds": median(self.seconds(mode)),
            "seconds_over_plain": median(self._ratios(self.seconds, mode)),
            "seconds_over_plain_all": self._ratios(self.seconds, mode),
            "cpu_s_per_gb": median(self.cpu_s_per_gb(mode)),
            "cpu_over_plain": median(self._ratios(self.cpu_s_per_gb, mode)),
            "cpu_over_plain_all": self._ratios(self.cpu_s_per_gb, mode),
        }

    def _cells(self, figure: Callable[[str], list[float]], mode: str) -> list[str]:
        ratios = self._ratios(figure, mode)
        return [
            f"{median(figure(mode)):.3f}",
            f"{median(ratios):.3f}",
            f"{min(ratios):.3f}-{max(ratios):.3f}",
        ]

    def _ratios(self, figure: Callable[[str], list[float]], mode: str) -> list[float]:
        """Each transfer over the plain one of its turn."""
        return [own / plain for own, plain in zip(figure(mode), figure(PLAIN), strict=True)]


def run_multicast_tls(options: MulticastBenchOptions, say: Callable[[str], None]) -> TlsReport:
    """The first strategy to the most receivers, in all modes. Raises BenchError and
    TestbedError."""
    strategy, hosts = options.strategies[0], max(options.receiver_hosts)
    with Testbed(options.network) as testbed, ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="livescale-bench-")))
        fleets = {
            name: TransferFleet(testbed, options, stack, mode)
            for name, mode in _modes(scratch, [host.name for host in testbed.hosts]).items()
        }
        say(f"  {options.network.hosts} hosts are up, with workers for {', '.join(fleets)}")
        runs: dict[str, list[MulticastRun]] = {name: [] for name in fleets}
        order = list(fleets)
        for turn in range(options.repetitions + 1):
            for name in order:
                run = fleets[name].once(strategy, hosts)
                # In the first turn connections are opened.
                runs[name] += [run] if turn else []
            order.append(order.pop(0))  # none of them always follows the same one
        say(f"  {strategy} is done")
    return TlsReport(
        strategy=strategy,
        receivers=hosts * options.network.devices_per_host,
        size_bytes=options.size_bytes,
        network=msgspec.structs.asdict(options.network),
        runs=runs,
    )


def _modes(scratch: Path, hosts: Sequence[str]) -> dict[str, DataPlaneMode]:
    cluster = ClusterFolder(scratch / "cluster")
    cluster.init()
    folders = {host: cluster.add(host) for host in hosts}
    checks = ContentChecks.NETWORK
    return {
        UNCHECKED: DataPlaneMode(),
        PLAIN: DataPlaneMode(checks),
        OFF: DataPlaneMode(checks, folders),
        ON: DataPlaneMode(checks, folders, seals=True),
    }
