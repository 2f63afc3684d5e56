"""A process of `bench receiving`: it computes decode Runs, receives parameters, or does both.

What it receives lies behind the model that it computes with, in one arena, which a second process
can take for its own, too. It is introduced to the senders by the settings of its first line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import SequenceSpec
from livescale.common.regions import aligned
from livescale.lab.bench.peers.line_server import Job, answering, serve_lines
from livescale.lab.bench.transfer.multicast_worker import SECRET, Transfer
from livescale.runtime.member_process.worker_process import SWITCH_INTERVAL_S
from livescale.transfer.formats.orders import ABORTED, ContentChecks, ReceiveOrder
from livescale.transfer.links.exchange import ConnectionTerms
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.transfer.plane.options import PlaneOptions
from livescale.values.chunks import ChunkGrid, Feed
from livescale.values.types import FromWorker, Manifest, SamplingParams, WorkerRef

_TOKEN_ID = 2
_FIRST_BYTES_S = 30.0
_POLL_S = 0.002
_THREAD_TIMES = Path("/proc/thread-self/schedstat")


class _Load(Transfer):
    """One that may be stalled: the rate tells."""

    def feed_stalled(self, upstream: WorkerRef, reason: str) -> None:
        """It may go on."""


class _Receiver:
    """Brings the same model to the same place again and again, between `begin` and `end`."""

    def __init__(self, job: Job, arena: Arena) -> None:
        self._arena = arena
        self._offset_bytes: int = job["offset_bytes"]
        self._chunk_bytes: int = job["chunk_bytes"]
        self._checks = ContentChecks(job["content_checks"])
        options = PlaneOptions(connections=ConnectionTerms(SECRET), carrier="tcp")
        self.plane = DataPlane(WorkerRef(job["worker"]), arena, options)
        self._plans = 0
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._failure = ""

    @property
    def received_bytes(self) -> int:
        return self.plane.usage().parameter_received_bytes

    def begin(self, job: Job) -> Job:
        """Receive from a sender that listens at (number, address, port), until `end`; the answer
        comes when bytes do."""
        number, host, port = job["sender"]
        manifest = msgspec.convert(job["manifest"], Manifest)
        self.plane.introduce(WorkerRef(number), (host, port))
        self._is_over.clear()
        before = self.received_bytes
        self._thread = threading.Thread(target=self._loads, args=(WorkerRef(number), manifest))
        self._thread.start()
        deadline_s = time.monotonic() + _FIRST_BYTES_S
        while self.received_bytes == before and not self._failure:
            if time.monotonic() > deadline_s:
                self._failure = "nothing comes"
            time.sleep(_POLL_S)
        return {"failure": self._failure}

    def end(self, _: Job) -> Job:
        """Nothing is received any more."""
        assert self._thread is not None
        self._is_over.set()
        while self._thread.is_alive():
            # The load of now; one that has just begun may not be known yet.
            self.plane.abort(self._plans)
            self._thread.join(_POLL_S)
        return {"failure": self._failure}

    def _loads(self, sender: WorkerRef, manifest: Manifest) -> None:
        sizes = [entry.size_bytes for entry in manifest.layers]
        feed = Feed(FromWorker(sender), ChunkGrid(sizes, self._chunk_bytes).all())
        while not self._is_over.is_set() and not self._failure:
            self._plans += 1
            order = ReceiveOrder(
                plan=self._plans,
                manifest=manifest,
                chunk_bytes=self._chunk_bytes,
                feeds=(feed,),
                offset_bytes=self._offset_bytes,
                content_checks=self._checks,
            )
            load = _Load()
            self.plane.receive(order, load)
            load.done.wait()
            self.plane.withdraw(manifest)
            self._failure = "; ".join(reason for reason in load.failures if reason != ABORTED)


class _Computer:
    """Decodes with a model that lies at the beginning of the arena."""

    def __init__(self, job: Job) -> None:
        # Imported here: a process that only receives needs no torch.
        from livescale.engine.files.model_files import read_manifest
        from livescale.lab.bench.peers.engines.livescale_engine import load_executor

        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._manifest = read_manifest(Path(job["directory"]), "computes")
        self._sequences: int = job["sequences"]
        self._prompt_tokens: int = job["prompt_tokens"]
        tokens = self._prompt_tokens + job["steps_max"] + 1
        self._kv_blocks = self._sequences * -(-tokens // job["block_tokens"])
        self.offset_bytes = aligned(self._manifest.size_bytes)
        self._executor, self.arena = load_executor(
            job,
            self._manifest,
            self._kv_blocks,
            arena_bytes=self.offset_bytes + job["received_bytes"],
        )

    def decode(self, steps: int) -> Job:
        """So many decode Runs of all sequences, their prompts' Run not counted: what they took, and
        the CPU time of the thread that computed, and how long it was ready and had no core."""
        executor = self._executor
        config = BatcherConfig(
            kv_blocks=self._kv_blocks,
            block_tokens=executor.block_tokens,
            run_tokens_max=self._sequences * self._prompt_tokens,
            sequences_max=self._sequences,
            growth_tokens=steps + 1,
        )
        batcher = Batcher(config, self._manifest.span)
        sampling = SamplingParams(output_tokens_max=steps + 1, ignore_eos=True)
        for number in range(self._sequences):
            prompt = (_TOKEN_ID + number,) * self._prompt_tokens
            batcher.add(SequenceSpec(str(number), 0, prompt, sampling))
        ends_ns = []
        began_cpu_ns = began_wait_ns = 0
        for step in range(steps + 1):
            run = batcher.next()
            assert run is not None, f"{batcher!r} has nothing to run"
            assert len(run.segments) == self._sequences, "all of them decode in each Run"
            batcher.done(run, [(token_id,) for token_id in executor.run(run).token_ids])
            ends_ns.append(time.perf_counter_ns())
            if step == 0:
                began_cpu_ns, began_wait_ns = time.thread_time_ns(), _core_wait_ns()
        return {
            "elapsed_ns": ends_ns[-1] - ends_ns[0],
            "cpu_ns": time.thread_time_ns() - began_cpu_ns,
            "core_wait_ns": _core_wait_ns() - began_wait_ns,
            "step_ns": [after - before for before, after in pairwise(ends_ns)],
        }


def _core_wait_ns() -> int:
    """How long this thread was ready to run and had no core, so far; 0 where the system does not
    count that."""
    try:
        _, waited_ns, _ = _THREAD_TIMES.read_text().split()
    except (OSError, ValueError):
        return 0
    return int(waited_ns)


class _Worker(_Receiver):
    """Answers one line after the other; what it receives comes meanwhile."""

    def __init__(self, job: Job) -> None:
        self._computer = _Computer(job) if "directory" in job else None
        if self._computer is not None:
            arena, offset_bytes = self._computer.arena, self._computer.offset_bytes
        else:
            offset_bytes = job["offset_bytes"]
            memfd = os.open(job["memfd"], os.O_RDWR | os.O_CLOEXEC)
            arena = Arena(job["arena_bytes"], memfd=memfd)
        super().__init__({**job, "offset_bytes": offset_bytes}, arena)
        #: what a second process needs to have the same arena
        self.shared: Job = {
            "memfd": f"/proc/{os.getpid()}/fd/{arena.fd}",
            "arena_bytes": arena.size_bytes,
            "offset_bytes": offset_bytes,
        }

    def usage(self, _: Job) -> Job:
        """What has come, and the CPU time of this process without that of this thread."""
        own_ns = time.thread_time_ns()
        return {
            "at_ns": time.monotonic_ns(),
            "received_bytes": self.received_bytes,
            "cpu_ns": time.process_time_ns() - own_ns,
        }

    def decode(self, job: Job) -> Job:
        assert self._computer is not None
        return self._computer.decode(job["steps"])


def load(job: Job) -> tuple[Job, Callable[[Job], Job]]:
    """The model, if there is one, is loaded, and a data plane is there."""
    worker = _Worker(job)
    return worker.shared, answering(worker)


if __name__ == "__main__":
    serve_lines(load)
