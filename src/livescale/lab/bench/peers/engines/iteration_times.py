"""Times single Runs of LiveScale's own engine, made by hand: no Batcher, no sockets.

A line asks for one Run (chunks of prompts, decodes of one context, whether they sample) and is
answered with its nanoseconds. What the KV cache holds does not matter, only how much of it is read.
Where one thread computes, its CPU time is taken: other programs on the machine do not count. A
line that says with how many `cores` is answered in wall time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter_ns, process_time_ns

import torch

from livescale.batching.runs.run import Run, Segment
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import read_manifest
from livescale.lab.bench.peers.engines.livescale_engine import load_executor
from livescale.lab.bench.peers.line_server import Job, serve_lines
from livescale.transfer.memory.arena import Arena
from livescale.values.types import Manifest, SamplingParams

_SAMPLING = SamplingParams(output_tokens_max=1, ignore_eos=True)
_TOKEN_ID = 2


def load(job: Job) -> tuple[str, partial[Job]]:
    """Read the model into an arena; the settings are the accelerator's name."""
    manifest = read_manifest(Path(job["directory"]), job["model"])
    executor, arena = load_executor(job, manifest, job["kv_blocks"], job["device"])
    name = "cpu"
    if executor.device.type == "cuda":
        name = torch.cuda.get_device_name(executor.device).lower().replace(" ", "-")
    return name, partial(_time, manifest, executor, arena)


def _time(manifest: Manifest, executor: TorchExecutor, arena: Arena, job: Job) -> Job:
    assert arena.size_bytes >= manifest.size_bytes  # and it lives as long as the views of it
    run = Run(0, manifest.span, tuple(_segments(job, executor.block_tokens)))
    cores = job.get("cores")
    assert cores is None or executor.use_cores(cores) == cores, f"{executor!r} has no {cores} cores"
    is_alone = cores is None and executor.device.type == "cpu" and torch.get_num_threads() == 1
    now_ns = process_time_ns if is_alone else perf_counter_ns
    _synchronize(executor)
    begin_ns = now_ns()
    executor.run(run)
    _synchronize(executor)
    return {"elapsed_ns": now_ns() - begin_ns}


def _segments(job: Job, block_tokens: int) -> Iterator[Segment]:
    """Each with blocks of its own, as different requests have."""
    parts = [(new, before, False) for new, before in job["prefills"]]
    parts += [(1, job["context"] - 1, job["samples"])] * job["decodes"]
    first_block = 0
    for number, (new, before, samples) in enumerate(parts):
        stop_block = first_block + -(-(new + before) // block_tokens)
        yield Segment(
            request=str(number),
            attempt=0,
            first_position=before,
            token_ids=(_TOKEN_ID,) * new,
            block_table=tuple(range(first_block, stop_block)),
            samples=samples,
            sampling=_SAMPLING,
            prompt_ids=(_TOKEN_ID,) * (new + before) if samples else (),
        )
        first_block = stop_block


def _synchronize(executor: TorchExecutor) -> None:
    if executor.device.type == "cuda":
        torch.cuda.synchronize(executor.device)


if __name__ == "__main__":
    serve_lines(load)
