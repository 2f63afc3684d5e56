"""A record's requests as they are judged: what the client knew, else what the gateway saw."""

from __future__ import annotations

from livescale.slo import RequestTiming
from livescale.telemetry.record import RequestLine
from livescale.types import Outcome


def due_ns(line: RequestLine) -> int:
    """When the client meant to send it, or, where the record does not know, when it arrived."""
    if line.scheduled_ns is not None:
        return line.scheduled_ns
    return line.queued_ns if line.arrived_ns is None else line.arrived_ns


def timing_of(line: RequestLine) -> RequestTiming:
    at_ns = due_ns(line)
    return RequestTiming(
        request=line.request,
        scheduled_ns=at_ns,
        sent_ns=at_ns if line.sent_ns is None else line.sent_ns,
        token_ns=line.token_ns,
        finished_ns=line.finished_ns,
        ok=line.outcome is Outcome.FINISHED,
    )
