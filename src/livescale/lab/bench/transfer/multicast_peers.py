"""What `bench multicast` compares with, on the same links in the same run.

A plain TCP stream says what a link gives, torch.distributed's gloo what others make of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from statistics import median

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.testbed.bed import BedLink, Testbed

_START_S = 120.0
_ROUND_S = 600.0


def stream_seconds(testbed: Testbed, size_bytes: int, repetitions: int) -> float:
    """Median time of one TCP stream from the first to the second host, connecting included."""
    ends = []
    with ExitStack() as stack:
        for host in testbed.hosts[:2]:
            name, inside = f"stream at {host.name}", testbed.inside(host.name)
            process = stack.enter_context(bench_process(name, "peers.plain_stream", before=inside))
            address = host.devices[0].address
            job = {"size_bytes": size_bytes, "address": address}
            ends.append((process, [address, process.ask(job, _START_S)["settings"]]))
        (sender, _), (receiver, place) = ends
        seconds = []
        for _ in range(repetitions):
            receiver.send({"do": "receive"})
            began_ns = sender.ask({"do": "send", "to": place}, _ROUND_S)["began_ns"]
            seconds.append((receiver.receive(_ROUND_S)["ended_ns"] - began_ns) / 1e9)
    return float(median(seconds))


def gloo_seconds(testbed: Testbed, size_bytes: int, receivers: Iterable[int]) -> dict[int, float]:
    """Time of a broadcast from the first device to so many of the others.

    The world of all ranks is joined and its groups are made before; only the broadcast counts.
    Raises BenchError, also when the bytes are not those of the source.
    """
    places = [(host.name, link) for host in testbed.hosts for link in host.devices]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(_gloo_rank(testbed, host, link, rank))
            for rank, (host, link) in enumerate(places)
        ]
        job: dict[str, object] = {
            "size_bytes": size_bytes,
            "ranks": len(places),
            "store": testbed.hosts[0].control_address,
        }
        for rank, process in enumerate(ranks):
            job["port"] = process.ask({**job, "rank": rank}, _START_S)["settings"]
        _all(ranks, {"do": "join"})
        return {count: _broadcast(ranks[: count + 1]) for count in receivers}


def _gloo_rank(testbed: Testbed, host: str, link: BedLink, rank: int) -> LineProcess:
    return bench_process(
        f"gloo rank {rank}",
        "peers.engines.gloo_broadcast",
        threads=1,
        before=testbed.inside(host),
        environ={"GLOO_SOCKET_IFNAME": link.name},
    )


def _broadcast(ranks: list[LineProcess]) -> float:
    """Seconds until the last of these ranks has the first one's bytes."""
    answers = _all(ranks, {"do": "broadcast", "receivers": len(ranks) - 1})
    if not all(answer["is_right"] for answer in answers):
        raise BenchError("gloo's broadcast left other bytes than the source's")
    began_ns = min(answer["began_ns"] for answer in answers)
    return (max(answer["ended_ns"] for answer in answers) - began_ns) / 1e9


def _all(processes: list[LineProcess], order: dict[str, object]) -> list[dict[str, int]]:
    """Ask all at once, then wait for all answers."""
    for process in processes:
        process.send(order)
    return [process.receive(_ROUND_S) for process in processes]
