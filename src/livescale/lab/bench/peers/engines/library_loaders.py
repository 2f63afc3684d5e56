"""Libraries that read safetensors, as loaders: all tensors of a directory in host memory.

An interpreter that has the library runs this file by its path, so nothing of this package can be
imported here but the file beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter_ns

import torch
from line_server import Job, serve_lines  # type: ignore[import-not-found]


def safetensors(files: list[str], buffer: torch.Tensor) -> int:
    """load_file maps the file and copies nothing: a copy into a touched buffer makes it a load."""
    from safetensors.torch import load_file

    end = 0
    for file in files:
        for tensor in load_file(file).values():
            content = tensor.view(torch.uint8).reshape(-1)
            buffer[end : end + content.numel()].copy_(content)
            end += content.numel()
    return end


def runai(files: list[str], buffer: torch.Tensor) -> int:
    """Run:ai's streamer; the tensors lie in memory of its own and belong to the caller."""
    from runai_model_streamer import SafetensorsStreamer

    kept = []
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        kept += [tensor for _, tensor in streamer.get_tensors()]
    return _bytes(kept)


def fastsafetensors(files: list[str], buffer: torch.Tensor) -> int:
    """fastsafetensors without GPUDirect; the tensors are views of its buffer."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: files})
    copied = loader.copy_files_to_device()
    try:
        return _bytes([copied.get_tensor(name) for name in copied.key_to_rank_lidx])
    finally:
        copied.close()
        loader.close()


LOADERS: dict[str, tuple[str, Callable[[list[str], torch.Tensor], int]]] = {
    "safetensors": ("safetensors", safetensors),
    "runai": ("runai-model-streamer", runai),
    "fastsafetensors": ("fastsafetensors", fastsafetensors),
}


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """The buffer is there, touched as in a process that waits for work."""
    package, loader = LOADERS[job["loader"]]
    files = sorted(str(path) for path in Path(job["directory"]).glob("*.safetensors"))
    size = sum(os.path.getsize(file) for file in files) if job["loader"] == "safetensors" else 0
    buffer = torch.zeros(size, dtype=torch.uint8)
    buffer.fill_(1)

    def read(_: Job) -> Job:
        began_ns = perf_counter_ns()
        done = loader(files, buffer)
        return {"elapsed_ns": perf_counter_ns() - began_ns, "bytes": done}

    return f"{package} {metadata.version(package)}", read


if __name__ == "__main__":
    serve_lines(load)
