"""LiveScale's own engine as a peer: Batcher and TorchExecutor in one process, no sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.engine.base.compute_cores import ComputeCores
from livescale.engine.base.run_result import RunResult
from livescale.engine.executor import TorchExecutor
from livescale.engine.files.model_files import model_spec, read_layers, read_manifest
from livescale.engine.kernels.span import clock
from livescale.engine.products.linear_choice import WeightsLayout
from livescale.engine.products.linear_timing import ensure_timings
from livescale.lab.bench.peers.line_server import Job, closed_loop, serve_lines
from livescale.transfer.memory.arena import Arena
from livescale.values.types import Manifest, SamplingParams


def load_executor(
    job: Job,
    manifest: Manifest,
    kv_blocks: int,
    device: str = "cpu",
    weights_layout: WeightsLayout = "auto",
    arena_bytes: int = 0,
) -> tuple[TorchExecutor, Arena]:
    """The model of the job's directory, layer by layer, as a worker has it. The executor computes
    from views of the arena (of `arena_bytes`, if the model needs less), which must live as long."""
    torch.set_num_threads(job["threads"])
    if device == "cpu" and weights_layout == "auto":
        ensure_timings()  # As a worker does before it is given a model.
    arena = Arena(max(arena_bytes, manifest.size_bytes))
    executor = TorchExecutor(
        kv_blocks * job["block_tokens"] * model_spec(manifest).kv_bytes_per_token,
        job["block_tokens"],
        device,
        parameter_bytes=0 if device == "cpu" else manifest.size_bytes,
        weights_layout=weights_layout,
        cores=ComputeCores(0) if device == "cpu" else None,
    )
    view = arena.view(0, manifest.size_bytes)
    executor.assign(manifest, view)
    for layer in read_layers(Path(job["directory"]), manifest, view):
        executor.materialize(layer)
    return executor, arena


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """KV blocks for as many requests as are in flight at most."""
    manifest = read_manifest(Path(job["directory"]), "bench")
    block_tokens = job["block_tokens"]
    request_blocks = -(-(job["prompt_tokens"] + job["output_tokens"]) // block_tokens)
    kv_blocks = request_blocks * job["in_flight_max"]
    layout: WeightsLayout = job["weights_layout"]
    executor, arena = load_executor(job, manifest, kv_blocks, weights_layout=layout)
    config = BatcherConfig(
        kv_blocks=executor.kv_blocks,
        block_tokens=block_tokens,
        run_tokens_max=job["run_tokens_max"],
        sequences_max=min(job["in_flight_max"], job["run_tokens_max"]),
    )
    settings = (
        f"run_tokens_max {config.run_tokens_max}, blocks of {block_tokens} tokens, {layout} weights"
    )
    return settings, partial(_play, manifest, executor, config, arena)


def _play(
    manifest: Manifest, executor: TorchExecutor, config: BatcherConfig, arena: Arena, job: Job
) -> Job:
    assert arena.size_bytes >= manifest.size_bytes  # and it lives as long as the views of it
    batcher = Batcher(config, manifest.span)
    sampling = SamplingParams(output_tokens_max=job["output_tokens"], ignore_eos=True)
    is_timed = job.get("is_timed", False) and executor.compiled is not None
    times = _StepTimes(executor) if is_timed else None

    def start(index: int) -> None:
        batcher.add(SequenceSpec(str(index), 0, tuple(job["prompts"][index]), sampling))

    def step() -> Iterable[tuple[int, list[int], bool]]:
        run = batcher.next()
        assert run is not None, f"{batcher!r} has nothing to run"
        result = executor.run(run) if times is None else times.run(run)
        for e in batcher.done(run, [(token_id,) for token_id in result.token_ids]):
            yield int(e.request), [*e.token_ids], e.finish_reason is not None

    answer = asdict(closed_loop(len(job["prompts"]), job["in_flight"], start, step))
    return answer if times is None else {**answer, "outside_share": times.outside_share}


class _StepTimes:
    """Where the time of decode steps goes, as the first thread sees them."""

    def __init__(self, executor: TorchExecutor) -> None:
        assert executor.compiled is not None
        self._executor, self._compiled = executor, executor.compiled
        self._total = self._known = 0

    def run(self, run: Run) -> RunResult:
        """Times the Run if all of its rows are decodes."""
        if run.prefill_tokens:
            return self._executor.run(run)
        self._compiled.time_parts(True)
        begun = clock()
        result = self._executor.run(run)
        self._total += clock() - begun
        self._known += sum(self._compiled.part_ticks)
        self._compiled.time_parts(False)
        return result

    @property
    def outside_share(self) -> float:
        """Of a step, what is neither a product nor attention: 0 to 1."""
        return 1 - self._known / max(self._total, 1)


if __name__ == "__main__":
    serve_lines(load)
