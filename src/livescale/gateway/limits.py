"""What a client may ask of the gateway at most. Values only; who keeps them is told beside each."""

from __future__ import annotations

from dataclasses import dataclass


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
