"""LiveScale's own engine as a peer: Batcher and TorchExecutor in one process, no sockets."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from livescale.batching.batcher import Batcher, BatcherConfig
from livescale.batching.run import SequenceSpec
from livescale.bench.peers.line_server import Job, closed_loop, serve_lines
from livescale.engine.executor import TorchExecutor
from livescale.engine.model_files import model_spec, read_layers, read_manifest
from livescale.transfer.arena import Arena
from livescale.types import Manifest, SamplingParams


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """Read the model into an arena, layer by layer, as a worker does."""
    torch.set_num_threads(job["threads"])
    directory = Path(job["directory"])
    manifest = read_manifest(directory, "bench")
    block_tokens = job["block_tokens"]
    request_blocks = -(-(job["prompt_tokens"] + job["output_tokens"]) // block_tokens)
    kv_blocks = request_blocks * job["in_flight_max"]
    kv_bytes = kv_blocks * block_tokens * model_spec(manifest).kv_bytes_per_token
    arena = Arena(manifest.size_bytes)
    executor = TorchExecutor(kv_bytes, block_tokens, packed_weights=job["packed_weights"])
    view = arena.view(0, manifest.size_bytes)
    executor.assign(manifest, view)
    for layer in read_layers(directory, manifest, view):
        executor.materialize(layer)
    config = BatcherConfig(
        kv_blocks=executor.kv_blocks,
        block_tokens=block_tokens,
        run_tokens_max=job["run_tokens_max"],
        sequences_max=min(job["in_flight_max"], job["run_tokens_max"]),
    )
    layout = "packed" if job["packed_weights"] else "plain"
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

    def start(index: int) -> None:
        batcher.add(SequenceSpec(str(index), 0, tuple(job["prompts"][index]), sampling))

    def step() -> Iterable[tuple[int, list[int], bool]]:
        run = batcher.next_run()
        assert run is not None, f"{batcher!r} has nothing to run"
        for e in batcher.commit(run, executor.run(run).token_ids):
            yield int(e.request), [e.token_id], e.finish_reason is not None

    return closed_loop(len(job["prompts"]), job["in_flight"], start, step).as_json()


if __name__ == "__main__":
    serve_lines(load)
