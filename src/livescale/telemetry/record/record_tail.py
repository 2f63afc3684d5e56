"""The end of a record that another program wrote: what was not finished is cut off.

Only the end of the file is read, however long the file is. Nothing here knows what a line means,
but for how each of them begins.
"""

from __future__ import annotations

import os

import zstandard

from livescale.telemetry.record.record_parts import FRAME_MAGIC

LINE_BEGINS = b'{"kind":"'
_LOOK_BYTES = 1 << 20


def mend_plain(descriptor: int) -> None:
    """Cut the file off behind its last whole line. Raises OSError."""
    end = stop = os.fstat(descriptor).st_size
    while stop:
        begin = max(stop - _LOOK_BYTES, 0)
        newline = os.pread(descriptor, stop - begin, begin).rfind(b"\n")
        if newline >= 0:
            _cut(descriptor, begin + newline + 1, end)
            return
        stop = begin
    _cut(descriptor, 0, end)


def mend_compressed(descriptor: int) -> None:
    """Cut the file off behind its last whole frame, and keep the lines of an unfinished one as a
    frame of their own. Raises OSError."""
    end = os.fstat(descriptor).st_size
    look_bytes = _LOOK_BYTES
    while True:
        begin = max(end - look_bytes, 0)
        tail = os.pread(descriptor, end - begin, begin)
        found = _last_frames(tail)
        if found is not None or begin == 0:
            break
        look_bytes *= 4
    whole, rest = found if found is not None else (0, b"")
    _cut(descriptor, begin + whole, end)
    if rest:
        # The file was a little longer before: there is room where a disk is full.
        write_all(descriptor, zstandard.ZstdCompressor(write_checksum=True).compress(rest))


def write_all(descriptor: int, data: bytes) -> None:
    """However often the system takes only a part. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _last_frames(tail: bytes) -> tuple[int, bytes] | None:
    """Where the last whole frame ends, and the whole lines of an unfinished one behind it. None:
    no frame begins in here."""
    at = tail.find(FRAME_MAGIC)
    # These four bytes may come up by chance; what follows is no frame of ours then.
    while at >= 0 and not _decoded(tail[at:])[0].startswith(LINE_BEGINS):
        at = tail.find(FRAME_MAGIC, at + 1)
    if at < 0:
        return None
    while at < len(tail):
        text, used_bytes = _decoded(tail[at:])
        if used_bytes is None:
            return at, text[: text.rfind(b"\n") + 1]
        at += used_bytes
    return at, b""


def _decoded(frame: bytes) -> tuple[bytes, int | None]:
    """The text of the frame that begins here, as far as it goes, and its length in bytes (None: it
    is not finished)."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    try:
        text = decoder.decompress(frame)
    except zstandard.ZstdError:
        return b"", None
    return text, len(frame) - len(decoder.unused_data) if decoder.eof else None


def _cut(descriptor: int, size: int, end: int) -> None:
    if size < end:
        os.ftruncate(descriptor, size)
