"""The files that records are written to: made, claimed, continued, and closed when they fail.

A record says what serving knows and did; none of it may be read by other users, and nothing that
happens to a record may stop the pool. What lines mean stands in `record.py`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import zstandard

from livescale.telemetry.record.record_parts import (
    FRAME_MAGIC,
    RecordError,
    is_compressed,
    part_path,
    parts_of,
)
from livescale.telemetry.record.record_tail import (
    LINE_BEGINS,
    mend_compressed,
    mend_plain,
    write_all,
)

_log = logging.getLogger(__name__)

_MODE = 0o600
# A frame ends after so much text: that is what a writer which is killed leaves to be mended.
_FRAME_TEXT_BYTES = 1 << 20
# A disk that takes this long behind the pool is one that cannot be written.
_PENDING_BYTES_MAX = 64 << 20


class RecordClaim:
    """The exclusive right to write one record, for as long as it is not closed.

    Other pools and commands that would write the same record are refused meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Make the file, if it is not there. RecordError when it cannot be written, is no record,
        or is being written by another program; nothing of it is changed."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open(path)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._check(path)
        except BaseException:
            self.close()
            raise

    def _check(self, path: Path) -> None:
        mode = os.fstat(self._descriptor).st_mode
        if stat.S_ISCHR(mode):
            return  # as /dev/null: it has no end, and no contents
        if not stat.S_ISREG(mode):
            raise RecordError(f"{path}: is not a file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(f"{path}: is being written by another pool or command") from error
        for _, part in parts_of(path):
            if not _is_record(part):
                raise RecordError(f"{part} exists and is not a run record. Set another `record`")


class RecordFile:
    """The last part of a record, for one life of a controller. Never raises when the disk fails:
    then the record is closed, and `problem` says why.

    `write` and `begin_part` only note what is to be written, `flush` and `close` do it; those may
    run in another thread.
    """

    def __init__(self, path: Path, bytes_max: int | None = None) -> None:
        """Continue the record behind its last whole line. A part that has reached `bytes_max` is
        followed by the next one (None: there is only one)."""
        self.problem: str | None = None
        self._path = path
        self._bytes_max = bytes_max
        self._number = 1
        self._descriptor = -1
        self._frame: zstandard.ZstdCompressionObj | None = None
        self._frame_text_bytes = 0
        #: of the part, as far as whole lines go
        self._bytes = 0
        #: what is to be written; None: the next part begins
        self._pending: deque[bytes | None] = deque()
        # One is the writer's alone, the other the flusher's.
        self._taken_bytes = self._written_bytes = 0
        self._flushing = threading.Lock()
        with self._failing():
            self._continue()

    @property
    def is_full(self) -> bool:
        """What is written next should begin a new part."""
        return self._bytes_max is not None and self._bytes >= self._bytes_max

    def write(self, data: bytes) -> None:
        """Whole lines for the record."""
        if self.problem is None:
            self._pending.append(data)
            self._taken_bytes += len(data)
            if self._taken_bytes - self._written_bytes > _PENDING_BYTES_MAX:
                self._fail(f"the disk is {_PENDING_BYTES_MAX >> 20} MiB behind")

    def begin_part(self) -> None:
        """What is written from now on stands in the next part."""
        if self.problem is None:
            self._pending.append(None)

    def flush(self) -> None:
        """Write down what was noted, so that readers see it."""
        with self._flushing, self._failing():
            lines: list[bytes] = []
            while self._pending and self.problem is None:
                item = self._pending.popleft()
                if item is not None:
                    lines.append(item)
                else:
                    self._put(lines)
                    lines = []
                    self._finish_part()
                    self._open_part(self._number + 1)
            self._put(lines)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        with self._flushing, self._failing():
            self._finish_part()

    # -- helpers, in the order used ---------------------------------------------------------

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """OSErrors close the record and go no further."""
        try:
            yield
        except OSError as error:
            self._fail(error.strerror or str(error))
        if self.problem is not None:
            self._give_up()

    def _fail(self, why: str) -> None:
        if self.problem is None:
            self.problem = why
            _log.error(
                "Writing the run record %s failed and stopped: %s. The pool continues",
                part_path(self._path, self._number),
                why,
            )

    def _give_up(self) -> None:
        """Leave a file that can be read: without the line in which it failed."""
        self._pending.clear()
        self._frame = None
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.ftruncate(descriptor, self._bytes)
            except OSError:
                _log.debug("the end of %s stays as it is", self._path)
            os.close(descriptor)

    def _continue(self) -> None:
        parts = parts_of(self._path)
        self._open_part(parts[-1][0] if parts else 1)
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            (mend_compressed if is_compressed(self._path) else mend_plain)(self._descriptor)
            self._bytes = os.fstat(self._descriptor).st_size
        if self.is_full:
            self._finish_part()
            self._open_part(self._number + 1)

    def _open_part(self, number: int) -> None:
        self._descriptor = _open(part_path(self._path, number))
        self._number = number
        self._bytes = 0

    def _put(self, lines: list[bytes]) -> None:
        if not lines or self._descriptor < 0:
            return
        text = b"".join(lines)
        data = self._compressed(text) if is_compressed(self._path) else text
        write_all(self._descriptor, data)
        self._bytes += len(data)
        self._written_bytes += len(text)

    def _compressed(self, text: bytes) -> bytes:
        if self._frame is None:
            self._frame = zstandard.ZstdCompressor(write_checksum=True).compressobj()
            self._frame_text_bytes = 0
        self._frame_text_bytes += len(text)
        is_last = self._frame_text_bytes >= _FRAME_TEXT_BYTES
        data = self._frame.compress(text)
        data += self._frame.flush(
            zstandard.COMPRESSOBJ_FLUSH_FINISH if is_last else zstandard.COMPRESSOBJ_FLUSH_BLOCK
        )
        if is_last:
            self._frame = None
        return data

    def _finish_part(self) -> None:
        if self._descriptor < 0:
            return
        if self._frame is not None:
            write_all(self._descriptor, self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
            self._frame = None
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


@contextmanager
def create_record(path: Path) -> Iterator[IO[bytes]]:
    """A new record in place of what was there, as one part. Raises OSError when it cannot be
    written, RecordError when it is being written by another program, or is not a record."""
    with ExitStack() as stack:
        claim = RecordClaim(path)
        stack.callback(claim.close)
        for number, part in parts_of(path):
            if number > 1:
                part.unlink()
        file: IO[bytes] = stack.enter_context(path.open("wb"))
        if is_compressed(path):
            compressor = zstandard.ZstdCompressor(write_checksum=True)
            file = stack.enter_context(compressor.stream_writer(file, closefd=False))
        yield file


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return os.open(path, flags, _MODE)


def _is_record(path: Path) -> bool:
    """Empty, or begun as a record is."""
    with path.open("rb") as file:
        begins = file.read(len(LINE_BEGINS))
    if is_compressed(path):
        return FRAME_MAGIC.startswith(begins[: len(FRAME_MAGIC)])
    return LINE_BEGINS.startswith(begins)
