"""Log lines that clients cause: one of a kind in a while, so that no client can fill a disk."""

from __future__ import annotations

import logging

SPAN_S = 60.0


class Seldom(logging.Filter):
    """Passes a message once per `span_s`, with the number of equal ones since the last."""

    def __init__(self, span_s: float = SPAN_S) -> None:
        super().__init__()
        self._span_s = span_s
        #: by message: when one passed last, and how many did not since
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = record.created
        passed_s, held = self._passed.get(record.msg, (-self._span_s, 0))
        if now_s - passed_s < self._span_s:
            self._passed[record.msg] = (passed_s, held + 1)
            return False
        self._passed[record.msg] = (now_s, 0)
        if held:
            record.msg = f"{record.msg} ({held} more since the last such line)"
        return True
