"""Safetensors files of a directory: which tensors lie where, and reading their bytes into place.

Headers are read here and never trusted: every range is checked against its file. Knows nothing of
layers. No torch.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from livescale.engine.base.errors import ModelError
from livescale.engine.files.model_config import parse_object

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that can run, by their safetensors names."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library

READ_THREADS = 4
"""Enough for the page cache and for an SSD: more gained nothing."""

PART_BYTES = 8 << 20
"""Bytes that one thread reads at a time."""

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file; `offset_bytes` counts from the file's start."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's checkpoint by name, single-file or sharded with an index.

    Raises ModelError for files that are missing, truncated or no safetensors.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return _file_tensors(single)
    if index.is_file():
        return _indexed_tensors(directory, index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors file")
    if len(files) > 1:
        raise ModelError(f"{directory} holds {len(files)} safetensors files and no {INDEX_FILE}")
    return _file_tensors(files[0])


def read_text(path: Path) -> str:
    """The file's text. Raises ModelError naming it."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class TensorReader:
    """Reads tensors' bytes into place, with several threads; keeps files open until it is left."""

    def __init__(self, threads: int = READ_THREADS) -> None:
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reads")
        self._opening = threading.Lock()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # No thread writes into the destinations any more, and only then the files are closed.
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()

    def read_into(self, tensor: StoredTensor, destination: memoryview, start: int = 0) -> None:
        """Fill `destination` with the tensor's bytes from `start` on.

        Raises ModelError on a short read.
        """
        assert start + len(destination) <= tensor.size_bytes, tensor.name
        descriptor = self._descriptor(tensor.path)
        done = 0
        while done < len(destination):
            # One call reads at most 2 GiB.
            at_bytes = tensor.offset_bytes + start + done
            count = os.preadv(descriptor, [destination[done:]], at_bytes)
            if count == 0:
                raise ModelError(
                    f"{tensor.path} ends inside {tensor.name}:"
                    f" read {start + done} of its {tensor.size_bytes} bytes"
                )
            done += count

    def start(
        self, reads: Iterable[tuple[StoredTensor, memoryview]], then: Callable[[], Read]
    ) -> Future[Read]:
        """Fill all destinations, each with a whole tensor, and call `then` when they are full.

        The future has what `then` returns, or the error. Reads are begun in the order of the
        calls; `then` runs in the thread that read the last part.
        """
        parts = [
            (tensor, destination[at : at + PART_BYTES], at)
            for tensor, destination in reads
            for at in range(0, len(destination), PART_BYTES)
        ]
        if not parts:
            return self._pool.submit(then)
        reading = _Reading(len(parts), then)
        for tensor, destination, at in parts:
            self._pool.submit(self._read_part, reading, tensor, destination, at)
        return reading.future

    def _read_part(
        self, reading: _Reading[Any], tensor: StoredTensor, destination: memoryview, start: int
    ) -> None:
        try:
            self.read_into(tensor, destination, start)
        except BaseException as error:
            reading.fail(error)
        else:
            reading.part_done()

    def _descriptor(self, path: Path) -> int:
        with self._opening:
            if path not in self._descriptors:
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise ModelError(f"{path} cannot be opened: {error.strerror}") from error
                self._stack.callback(os.close, descriptor)
                self._descriptors[path] = descriptor
            return self._descriptors[path]


class _Reading(Generic[Read]):
    """Parts that are read by several threads, and what follows the last of them."""

    def __init__(self, parts: int, then: Callable[[], Read]) -> None:
        self.future: Future[Read] = Future()
        self._lock = threading.Lock()
        self._left = parts
        self._then = then

    def part_done(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            try:
                self.future.set_result(self._then())
            except BaseException as error:
                self.future.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """The first failure counts. Parts that fail are never done, so `then` is not called."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)


def _indexed_tensors(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = parse_object(read_text(index), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    files = {tensor: str(file) for tensor, file in weight_map.items()}
    found: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(files.values())):
        # The index may not lead out of the directory.
        if Path(name).name != name or not (directory / name).is_file():
            raise ModelError(f"{index} names {name}, which is not in {directory}")
        found[name] = _file_tensors(directory / name)
    for tensor, file in files.items():
        if tensor not in found[file]:
            raise ModelError(f"{index} says that {tensor} is in {file}, but it is not")
    return {tensor: found[file][tensor] for tensor, file in files.items()}


def _file_tensors(path: Path) -> dict[str, StoredTensor]:
    """The header of one file: 8 bytes of length, that many bytes of JSON, then the data."""
    try:
        with path.open("rb") as file:
            actual_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > HEADER_BYTES_MAX:
                raise ModelError(f"{path} is no safetensors file: header of {header_bytes} bytes")
            data_start = 8 + header_bytes
            if actual_bytes < 8 or actual_bytes < data_start:
                raise _truncated(path, max(data_start, 8), actual_bytes)
            header = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(header)
        tensors = {
            name: _tensor(name, path, entry, data_start)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} has a broken safetensors header: {error!r}") from error
    ends = [tensor.offset_bytes + tensor.size_bytes for tensor in tensors.values()]
    if max(ends, default=0) > actual_bytes:
        raise _truncated(path, max(ends), actual_bytes)
    return tensors


def _tensor(name: str, path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    if not 0 <= start <= stop or any(size < 0 for size in shape):
        raise ValueError(f"{name} lies at [{start}, {stop}) with shape {shape}")
    if dtype in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name} has {stop - start} bytes for shape {shape} of {dtype}")
    return StoredTensor(name, path, dtype, shape, data_start + start, stop - start)


def _truncated(path: Path, expected_bytes: int, actual_bytes: int) -> ModelError:
    return ModelError(
        f"{path} is truncated: expected {expected_bytes} bytes, the file has {actual_bytes}"
    )
