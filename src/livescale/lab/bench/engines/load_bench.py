"""`bench load`: from safetensors files to host memory, by our reader and by libraries.

Every loader has a process of its own and stays; they take turns. Warm: the files are in the page
cache. Cold: their pages were dropped, and no others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from livescale.common.interpreter import module_words
from livescale.engine.files.layout import plan_checkpoint
from livescale.engine.files.model_config import parse_config
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.engines.engine_report import OURS
from livescale.lab.bench.engines.engines import PEERS, PEERS_PATH, has_package
from livescale.report.run.terminal import table

LIBRARIES = {
    "safetensors": "safetensors",
    "runai": "runai-model-streamer",
    "fastsafetensors": "fastsafetensors",
}
"""Loaders to compare with, and the package of each."""

_START_S = 600.0
_ROUND_S = 600.0
_VOCABULARY = 8192
_BYTES_PER_PARAMETER = 2


@dataclass(frozen=True, slots=True)
class LoadBenchOptions:
    """What is run: a directory, or a made model of about `size_bytes`."""

    directory: Path | None = None
    size_bytes: int = 1 << 30
    repetitions: int = 3
    is_cold: bool = True
    peer_python: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One loader with warm or with cold files: seconds of each repetition."""

    loader: str
    cache: str
    settings: str
    bytes: int
    seconds: tuple[float, ...]
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All rows, and the loaders that are not here."""

    rows: tuple[LoadRow, ...]
    absent: tuple[str, ...]

    def ratio(self, loader: str, cache: str) -> float | None:
        """Our rate over a loader's; None if either was not measured."""
        rates = {(row.loader, row.cache): row.bytes_per_s for row in self.rows}
        ours, other = rates.get((OURS, cache)), rates.get((loader, cache))
        return None if ours is None or other is None else ours / other

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {
            f"load_ratio_to_{row.loader}_{row.cache}": self.ratio(row.loader, row.cache)
            for row in self.rows
            if row.loader != OURS
        }
        figures["absent"] = list(self.absent)
        figures["rows"] = [asdict(row) for row in self.rows]
        return figures

    def text(self) -> str:
        rows = []
        for row in self.rows:
            rates = [row.bytes / seconds / 1e9 for seconds in row.seconds]
            ratio = None if row.loader == OURS else self.ratio(row.loader, row.cache)
            spread = f"{min(rates):.1f}-{max(rates):.1f}"
            rows.append([row.loader, row.cache, median(rates), spread, ratio, row.settings])
        header = ["loader", "files", "GB/s", "least-most", "ours/it", "settings"]
        absent = [f"{name} is not here: --peer-python has no such package" for name in self.absent]
        return "\n".join([table(header, rows), *absent])


def run_load(options: LoadBenchOptions, say: Callable[[str], None]) -> LoadReport:
    """Load with everything that is installed, in turns. Raises BenchError and ModelError."""
    pythons = _pythons(options.peer_python)
    absent = tuple(name for name in LIBRARIES if name not in pythons)
    with _directory(options) as directory, ExitStack() as stack:
        files = _files(directory)
        words = module_words("livescale.lab.bench.peers.engines.livescale_loader")
        loaders = [_Loader(OURS, words, directory)]
        for name, python in pythons.items():
            words = [str(python), str(PEERS / "library_loaders.py")]
            loaders.append(_Loader(name, words, directory))
        for loader in loaders:
            stack.callback(loader.process.close)
        say(f"  {sum(map(os.path.getsize, files)) / 1e6:.0f} MB in {len(files)} files")
        caches = ("warm", "cold") if options.is_cold else ("warm",)
        rows = [row for cache in caches for row in _rows(loaders, files, cache, options, say)]
    return LoadReport(tuple(rows), absent)


class _Loader:
    """A loader in a process of its own."""

    def __init__(self, name: str, words: list[str], directory: Path) -> None:
        self.name = name
        self.process = LineProcess(name, words, {"OMP_NUM_THREADS": "1", **PEERS_PATH})
        job = {"loader": name, "directory": str(directory)}
        self.settings = str(self.process.ask(job, _START_S)["settings"])

    def read(self) -> tuple[float, int]:
        """(seconds, bytes of tensors) of one load."""
        answer = self.process.ask({"do": "read"}, _ROUND_S)
        return answer["elapsed_ns"] / 1e9, answer["bytes"]


def _rows(
    loaders: list[_Loader],
    files: list[Path],
    cache: str,
    options: LoadBenchOptions,
    say: Callable[[str], None],
) -> Iterator[LoadRow]:
    """Every loader loads once uncounted; then they take turns."""
    seconds: dict[str, list[float]] = {loader.name: [] for loader in loaders}
    sizes: dict[str, int] = {}
    for repetition in range(options.repetitions + 1):
        for loader in loaders:
            if cache == "cold":
                for file in files:
                    _drop_pages(file)
            took_s, size_bytes = loader.read()
            # A library may load more: tensors that are no parameters.
            if sizes.setdefault(loader.name, size_bytes) < sizes[OURS]:
                raise BenchError(
                    f"{loader.name} loaded {size_bytes} bytes of tensors, {OURS} {sizes[OURS]}"
                )
            if repetition:
                seconds[loader.name].append(took_s)
    say(f"  {cache} files are done")
    for loader in loaders:
        size_bytes, took = sizes[loader.name], tuple(seconds[loader.name])
        rate = size_bytes / median(took)
        yield LoadRow(loader.name, cache, loader.settings, size_bytes, took, rate)


def _pythons(peer_python: Path | None) -> dict[str, Path]:
    """The interpreter of each library that is installed somewhere."""
    found = {}
    for name, package in LIBRARIES.items():
        for python in (Path(sys.executable), peer_python):
            if python is None or name in found:
                continue
            if has_package("--peer-python", python, package):
                found[name] = python
    return found


@contextmanager
def _directory(options: LoadBenchOptions) -> Iterator[Path]:
    if options.directory is not None:
        yield options.directory
        return
    with made_model(shape_of_size(options.size_bytes), _VOCABULARY, "bfloat16") as directory:
        yield directory


def shape_of_size(size_bytes: int) -> BenchShape:
    """A shape in bfloat16 of about this size; one layer at least."""
    hidden = 512 if size_bytes < 512 << 20 else 2048
    # Attention of 2.5 and an MLP of 8 squares; two tables of the vocabulary.
    layer_bytes = 21 * hidden * hidden // 2 * _BYTES_PER_PARAMETER
    rest_bytes = size_bytes - 2 * _VOCABULARY * hidden * _BYTES_PER_PARAMETER
    return BenchShape(hidden, max(1, rest_bytes // layer_bytes))


def _files(directory: Path) -> list[Path]:
    """The files of a model that can be loaded at all. Raises ModelError."""
    path = directory / "config.json"
    if not path.is_file():
        raise BenchError(f"{directory} is no model: it has no config.json")
    checkpoint = plan_checkpoint(directory, parse_config(path.read_text(), str(path)))
    used = {
        part.path for plan in checkpoint.layers for source in plan.sources for part in source.parts
    }
    return sorted(used)


def _drop_pages(file: Path) -> None:
    """The file's pages leave the page cache; only clean ones can."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
