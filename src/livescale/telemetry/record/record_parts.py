"""The files of a record: how parts are named, found and read, plain or compressed.

A record that grows beyond its bound goes on in further parts: `today.jsonl`, `today.2.jsonl`,
`today.3.jsonl`, … A name that ends in `.zst` is compressed with Zstandard (`today.jsonl.zst`,
`today.2.jsonl.zst`). Nothing here knows what a line means.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import zstandard

from livescale.common.errors import UserError

COMPRESSED = ".zst"
FRAME_MAGIC = zstandard.FRAME_HEADER
# What a reader is willing to keep of a file for its back references.
_WINDOW_BYTES_MAX = 1 << 27


class RecordError(UserError):
    """A run record cannot be read, or is not one that can be written: names the file."""


def is_compressed(path: Path) -> bool:
    """The record is compressed, by its name."""
    return path.suffix == COMPRESSED


def record_name(path: Path) -> str:
    """The file's name without its endings: "today" for "today.jsonl.zst"."""
    return _inner(path).stem


def part_path(path: Path, number: int) -> Path:
    """Where the record's part of this number is; 1 is the record's own path."""
    if number == 1:
        return path
    inner = _inner(path)
    ending = path.name[len(inner.name) :]
    return path.with_name(f"{inner.stem}.{number}{inner.suffix}{ending}")


def parts_of(path: Path) -> list[tuple[int, Path]]:
    """The parts of a record that are there, in order. The first may be missing."""
    inner = _inner(path)
    ending = path.name[len(inner.name) :]
    pattern = re.compile(
        rf"{re.escape(inner.stem)}\.([1-9][0-9]*){re.escape(inner.suffix + ending)}"
    )
    found = [(1, path)] if path.exists() else []
    if path.parent.is_dir():
        names = [(pattern.fullmatch(other.name), other) for other in path.parent.iterdir()]
        found += [(int(match[1]), other) for match, other in names if match and match[1] != "1"]
    return sorted(found)


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of one file, each with its newline; an unfinished last one is left out.

    Raises OSError, or zstandard.ZstdError where a compressed file is damaged.
    """
    with path.open("rb") as file, _plain(path, file) as plain:
        for text in plain:
            if not text.endswith(b"\n"):
                return
            yield text


def _plain(path: Path, file: IO[bytes]) -> IO[bytes]:
    if not is_compressed(path):
        return file
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(
        file, read_across_frames=True
    )
    return cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, reader), 1 << 17))


def _inner(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(COMPRESSED)) if is_compressed(path) else path
