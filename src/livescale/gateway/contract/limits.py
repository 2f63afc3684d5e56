"""What a client may ask of the gateway at most: bounds of a request and of its connection, of its
head and trailers, and what a head must say. Parser and answers are in `server.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from livescale.gateway.contract.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one HTTP request and its connection.

    `body_bytes_max` and `receive_timeout_s` (until the last byte of a request is here) are kept by
    `app.py` and, for what never becomes a request, by `server.py`; `request_timeout_s` (from
    arrival to the last token, None: no limit) by `streaming.py`; `stalled_client_s` (for which a
    client reads nothing while its answer waits) by `server.py`.
    """

    body_bytes_max: int = 8 * 1024 * 1024
    receive_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    stalled_client_s: float = 60.0


HEAD_BYTES_MAX = 64 * 1024
"""Bytes of the target and of names and values, trailers included: no honest client needs more."""
HEADERS_MAX = 128
"""Headers and trailers of one request."""
_HOST = re.compile(rb"([\w.~!$&'()*+,;=%-]*|\[[\w.~:%-]+\])(:\d*)?")


class HeadBounds:
    """The bounds of one connection's heads. Every call raises ApiError (431, 400).

    `begin` is called for each message, `take_target` and `take_header` as the parser yields parts,
    `feed` after each read: a parser keeps what it has not yielded yet, so that is counted too.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._headers = 0
        self._unyielded_bytes = 0
        self._has_yielded = False

    def begin(self) -> None:
        self._bytes = self._headers = 0
        self.yielded()

    def yielded(self) -> None:
        """The parser has come to the end of a part: it keeps nothing of what came before."""
        self._has_yielded = True

    def take_target(self, part: bytes) -> None:
        self.yielded()
        self._add(len(part))

    def take_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer."""
        self.yielded()
        self._headers += 1
        if self._headers > HEADERS_MAX:
            raise _too_large(f"has more than {HEADERS_MAX} headers")
        self._add(len(name) + len(value))

    def feed(self, size_bytes: int) -> None:
        """So many bytes have been read, and the parser has been through them."""
        self._unyielded_bytes = 0 if self._has_yielded else self._unyielded_bytes + size_bytes
        self._has_yielded = False
        if self._unyielded_bytes > HEAD_BYTES_MAX:
            raise _too_large(f"exceeds {HEAD_BYTES_MAX} bytes")

    def _add(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        if self._bytes > HEAD_BYTES_MAX:
            raise _too_large(f"exceeds {HEAD_BYTES_MAX} bytes")


def check_head(http_version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """The head is of a version that is served, names one valid Host (RFC 9112, 3.2), which HTTP/1.0
    need not, and no transfer coding but chunked (6.1). Raises ApiError (400, 501, 505)."""
    if http_version not in ("1.0", "1.1"):
        raise _not_supported(505, f"HTTP/{http_version} is not supported. Use HTTP/1.1")
    hosts = []
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise _not_supported(501, "The only supported Transfer-Encoding is chunked")
    if len(hosts) > 1 or (not hosts and http_version != "1.0"):
        problem = "has no Host header" if not hosts else "has more than one Host header"
        raise invalid(f"The request {problem}", code="invalid_http")
    if hosts and _HOST.fullmatch(hosts[0].strip()) is None:
        raise invalid("The request's Host header is invalid", code="invalid_http")


def _not_supported(status: int, message: str) -> ApiError:
    return ApiError(status, message, code="http_not_supported")


def _too_large(problem: str) -> ApiError:
    return ApiError(431, f"The request's head {problem}", code="headers_too_large")
