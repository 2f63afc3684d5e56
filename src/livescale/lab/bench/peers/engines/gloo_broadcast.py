"""torch.distributed's broadcast with gloo as a peer of `bench multicast`: one process per rank.

The interface of the data and the addresses of the store are given, so that nothing listens
elsewhere.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic_ns

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from livescale.lab.bench.peers.line_server import Job, serve_lines

_WAIT = timedelta(seconds=180)


def load(job: Job) -> tuple[int, Callable[[Job], Job]]:
    """Ranks `0…n` for every number of receivers form a group; they meet at rank 0's store."""
    store, port = _store(job)
    content = torch.full((job["size_bytes"],), job["rank"] == 0, dtype=torch.uint8)
    return port, partial(_answer, store, content, job["rank"], job["ranks"], {})


def _store(job: Job) -> tuple[TCPStore, int]:
    if job["rank"] == 0:
        # The store's own socket would listen everywhere.
        listening = socket.create_server((job["store"], 0))
        port = listening.getsockname()[1]
        return (
            TCPStore(
                job["store"],
                port,
                is_master=True,
                timeout=_WAIT,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
                use_libuv=True,
            ),
            port,
        )
    port = job["port"]
    return TCPStore(job["store"], port, is_master=False, timeout=_WAIT), port


def _answer(
    store: TCPStore,
    content: torch.Tensor,
    rank: int,
    ranks: int,
    groups: dict[int, dist.ProcessGroup],
    job: Job,
) -> Job:
    """Rank 0's bytes to the ranks up to `receivers`. The first line joins the world."""
    if job["do"] == "join":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_WAIT)
        for receivers in range(1, ranks):
            groups[receivers] = dist.new_group(list(range(receivers + 1)), timeout=_WAIT)
        return {}
    group = groups[job["receivers"]]
    if rank:
        content.zero_()
    dist.barrier(group)
    began_ns = monotonic_ns()
    dist.broadcast(content, 0, group)
    ended_ns = monotonic_ns()
    is_right = bool(content[0] == 1) and bool(content[-1] == 1)
    return {"began_ns": began_ns, "ended_ns": ended_ns, "is_right": is_right}


if __name__ == "__main__":
    # libuv and gloo print hostnames they cannot resolve; one thread is all that is needed.
    torch.set_num_threads(1)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        sys.exit("GLOO_SOCKET_IFNAME must name the interface of the data")
    serve_lines(load)
