"""Server-sent events: from pieces of a byte stream to the data of each event.

Pure: bytes in, bytes out. What the data means is decided by the caller.
"""

from __future__ import annotations

EVENT_BYTES_MAX = 4 << 20
"""Longest event that is kept in memory while it is incomplete."""


class SseError(ValueError):
    """The stream cannot be server-sent events of a bounded size."""


class SseParser:
    """Collects the `data` of events; comments and other fields are dropped.

    Lines may end in LF or CRLF and be cut anywhere between two calls of `push`. (A lone CR, which
    the standard allows too, is sent by no server and would cost a look at every byte.)
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def push(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece completes. Raises SseError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._data_bytes = [], 0
        if self._data_bytes + len(self._rest) > EVENT_BYTES_MAX:
            raise SseError(f"an event is longer than {EVENT_BYTES_MAX} bytes")
        return events

    def __repr__(self) -> str:
        return f"<SseParser {self._data_bytes + len(self._rest)} bytes of an incomplete event>"
