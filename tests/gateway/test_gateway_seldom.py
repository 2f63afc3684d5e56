"""Log lines of which clients could cause any number."""

from __future__ import annotations

import logging

from livescale.gateway.http.server import Seldom


def passed(seldom: Seldom, at_s: float, message: str) -> str | None:
    record = logging.LogRecord("x", logging.WARNING, "x", 1, message, (), None)
    record.created = at_s
    return record.getMessage() if seldom.filter(record) else None


def test_one_of_a_kind_passes_in_a_while_and_counts_the_others() -> None:
    seldom = Seldom(60.0)
    assert passed(seldom, 0.0, "a") == "a"
    assert passed(seldom, 1.0, "b") == "b"
    assert [passed(seldom, at_s, "a") for at_s in (2.0, 30.0, 59.0)] == [None] * 3
    assert passed(seldom, 60.0, "a") == "a (3 more since the last such line)"
    assert passed(seldom, 61.5, "b") == "b"
