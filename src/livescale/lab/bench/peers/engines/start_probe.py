"""A worker that reports when each part of its start was over: the probe of `bench coldstart`.

Heavy imports are what is measured, so the worker itself is imported when the first line has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from livescale.lab.bench.peers.line_server import Job, answering, serve_lines


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """Start as a worker does."""
    process_ns = time.monotonic_ns()
    from livescale.lab.bench.peers.engines.probed_worker import ProbedWorker

    worker = ProbedWorker(job, process_ns)
    return "a worker", answering(worker)


if __name__ == "__main__":
    serve_lines(load)
