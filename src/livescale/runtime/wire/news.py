"""What people who look at a pool are told: news, a line each, and how far loads have got.

Values only. Who finds out what is new is elsewhere (`step_news.py`, `supervisor.py`), and so is how
it is shown.
"""

from __future__ import annotations

import logging

from livescale.values.types import Value

_log = logging.getLogger(__name__)


class News(Value, frozen=True):
    """One event in words. `is_problem`: a person should look."""

    text: str
    is_problem: bool = False


class LoadProgress(Value, frozen=True):
    """A model on its way to `receiver`: whole layers, and since when."""

    model: str
    receiver: str
    arrived_bytes: int
    size_bytes: int
    elapsed_ns: int

    @property
    def bytes_per_s(self) -> int:
        return self.arrived_bytes * 1_000_000_000 // max(self.elapsed_ns, 1)


class PoolProgress(Value, frozen=True):
    """Processes that are ready, of all; loads under way."""

    ready: int
    processes: int
    loads: tuple[LoadProgress, ...] = ()


def log_news(news: News | PoolProgress) -> None:
    """What a program shows that has no display of its own: problems, and the rest at level info."""
    if isinstance(news, News):
        _log.log(logging.WARNING if news.is_problem else logging.INFO, "%s", news.text)
