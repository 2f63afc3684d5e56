"""Our way into host memory as a loader: every layer into a touched buffer, in place, verified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns

from livescale.engine.files.checkpoint import PART_BYTES, READ_THREADS
from livescale.engine.files.model_files import read_layers, read_manifest
from livescale.lab.bench.peers.line_server import Job, serve_lines
from livescale.values.types import Manifest

_PAGE_BYTES = 4096


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """The manifest is there and the buffer is touched, as in a process that waits for work."""
    directory = Path(job["directory"])
    manifest = read_manifest(directory, "bench")
    buffer = memoryview(bytearray(manifest.size_bytes))
    buffer[::_PAGE_BYTES] = bytes(len(buffer[::_PAGE_BYTES]))
    settings = f"{READ_THREADS} threads, parts of {PART_BYTES >> 20} MiB, checksums verified"
    return settings, partial(_read, directory, manifest, buffer)


def _read(directory: Path, manifest: Manifest, buffer: memoryview, job: Job) -> Job:
    began_ns = perf_counter_ns()
    layers = list(read_layers(directory, manifest, buffer))
    elapsed_ns = perf_counter_ns() - began_ns
    sizes = [t.size_bytes for layer in layers for t in manifest.layers[layer].tensors]
    return {"elapsed_ns": elapsed_ns, "bytes": sum(sizes)}


if __name__ == "__main__":
    serve_lines(load)
