"""`bench mesh`: what the mesh of data planes costs against the number of workers.

Every worker is a process with a small arena on 127.0.0.1; they use TCP, as between hosts. Nothing
is transferred: connections, memory and threads are counted and the set-up is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.report.run.terminal import table

_ARENA_BYTES = 1 << 20
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class MeshRow:
    """One number of workers. Memory and threads are those of the median worker; `setup_ns` is
    from the first introduction until the last connection is open."""

    workers: int
    eager_peers_max: int
    connections: int
    setup_ns: int
    rss_bytes: int
    mesh_rss_bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class MeshReport:
    """Rows in the order asked for."""

    rows: tuple[MeshRow, ...]

    def as_json(self) -> dict[str, object]:
        return {"rows": [asdict(row) for row in self.rows]}

    def text(self) -> str:
        header = ["workers", "eager", "connections", "set-up ms", "MiB each", "of it mesh"]
        rows = [
            [
                *(row.workers, row.eager_peers_max, row.connections, row.setup_ns / 1e6),
                *(row.rss_bytes / 2**20, row.mesh_rss_bytes / 2**20, row.threads),
            ]
            for row in self.rows
        ]
        return table([*header, "threads"], rows)


def run_mesh(
    workers: Sequence[int], eager_peers_max: int, say: Callable[[str], None]
) -> MeshReport:
    """Build a mesh of each size, one after the other. Raises BenchError."""
    rows = []
    for count in workers:
        rows.append(_row(count, eager_peers_max))
        say(f"  {count} workers are done")
    return MeshReport(tuple(rows))


def eager_connections(number: int, workers: int, eager_peers_max: int) -> int:
    """Connections that worker `number` gets without being asked for anything: it calls the next
    ones, and those before call it."""
    return min(eager_peers_max, workers - 1 - number) + min(eager_peers_max, number)


def _row(count: int, eager_peers_max: int) -> MeshRow:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(bench_process(f"worker {number}", "transfer.multicast_worker"))
            for number in range(count)
        ]
        for number, worker in enumerate(workers):
            worker.send(
                {
                    "worker": number,
                    "host": f"h{number}",
                    "address": "127.0.0.1",
                    "arena_bytes": _ARENA_BYTES,
                    "eager_peers_max": eager_peers_max,
                }
            )
        settings = [worker.receive(_START_S)["settings"] for worker in workers]
        before = _usage(workers)
        peers = [[k, found["address"], found["port"], None] for k, found in enumerate(settings)]
        wanted = [eager_connections(k, count, eager_peers_max) for k in range(count)]
        setup_ns, connections = introduce(workers, peers, wanted)
        after = _usage(workers)
    grown = [now["rss_bytes"] - was["rss_bytes"] for was, now in zip(before, after, strict=True)]
    return MeshRow(
        workers=count,
        eager_peers_max=eager_peers_max,
        connections=connections,
        setup_ns=setup_ns,
        rss_bytes=int(median(usage["rss_bytes"] for usage in after)),
        mesh_rss_bytes=int(median(grown)),
        threads=int(median(usage["threads"] for usage in after)),
    )


def introduce(
    workers: Sequence[LineProcess], peers: Sequence[Sequence[object]], wanted: Sequence[int]
) -> tuple[int, int]:
    """(ns, connections) of introducing all to all: each worker, what others know of it, and the
    connections it is to have. Raises BenchError when one is missing."""
    began_ns = time.monotonic_ns()
    for worker, own, count in zip(workers, peers, wanted, strict=True):
        worker.send({"do": "introduce", "peers": [peer for peer in peers if peer is not own]})
        worker.send({"do": "connected", "peers": count, "wait_s": _START_S / 2})
    answers = []
    for worker, count in zip(workers, wanted, strict=True):
        worker.receive(_START_S)
        answers.append(worker.receive(_START_S))
        if answers[-1]["peers"] < count:
            raise BenchError(f"{worker.name} has {answers[-1]['peers']} of {count} connections")
    ended_ns: int = max(answer["at_ns"] for answer in answers)
    # Both ends count a connection.
    return ended_ns - began_ns, sum(answer["peers"] for answer in answers) // 2


def _usage(workers: list[LineProcess]) -> list[dict[str, Any]]:
    return [worker.ask({"do": "usage"}, _START_S) for worker in workers]
