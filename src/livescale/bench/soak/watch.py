"""What the processes of a soaked pool hold: memory and descriptors over the requests served.

Processes die and are replaced in a soak, so growth is taken within lives: one slope per kind of
process, each life with an intercept of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

# What a process allocates at its first requests is not growth.
_WARM_REQUESTS = 100
# A slope over fewer requests says nothing.
_LIFE_REQUESTS_MIN = 50


@dataclass(frozen=True, slots=True)
class HeldLook:
    """What one process held after so many requests of the load."""

    name: str
    pid: int
    requests: int
    rss_bytes: int
    descriptors: int

    @property
    def kind(self) -> str:
        return self.name.split(" ")[0]


class HeldWatch:
    """Looks at every process of the pool now and then."""

    def __init__(self) -> None:
        self.looks: list[HeldLook] = []
        #: requests served when a process was seen first, by pid
        self._born: dict[int, int] = {}

    def look(self, pids: dict[str, int], requests: int) -> None:
        """Take down what each of these processes holds; those that just died are left out."""
        for name, pid in pids.items():
            born = self._born.setdefault(pid, requests)
            if requests - born < _WARM_REQUESTS:
                continue
            try:
                process = psutil.Process(pid)
                rss, descriptors = process.memory_info().rss, process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self.looks.append(HeldLook(name, pid, requests, rss, descriptors))

    def rss_growth(self) -> dict[str, float]:
        """Bytes per 1,000 requests, by kind of process; kinds that lived too shortly are absent."""
        return self._growth([(x.kind, x.pid, x.requests, x.rss_bytes) for x in self.looks])

    def descriptor_growth(self) -> dict[str, float]:
        """Descriptors per 1,000 requests, by kind of process."""
        return self._growth([(x.kind, x.pid, x.requests, x.descriptors) for x in self.looks])

    @staticmethod
    def _growth(rows: Sequence[tuple[str, int, int, int]]) -> dict[str, float]:
        kinds = sorted({kind for kind, *_ in rows})
        slopes = {kind: slope_within(r[1:] for r in rows if r[0] == kind) for kind in kinds}
        return {kind: 1000 * slope for kind, slope in slopes.items() if slope is not None}


def slope_within(rows: Iterable[tuple[int, int, int]]) -> float | None:
    """The common slope of y over x, from (life, x, y), with an intercept for each life (least
    squares). None where no life is long enough."""
    lives: dict[int, list[tuple[int, int]]] = {}
    for life, x, y in rows:
        lives.setdefault(life, []).append((x, y))
    products = squares = 0.0
    for points in lives.values():
        xs = [x for x, _ in points]
        if max(xs) - min(xs) < _LIFE_REQUESTS_MIN:
            continue
        mean_x = sum(xs) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        products += sum((x - mean_x) * (y - mean_y) for x, y in points)
        squares += sum((x - mean_x) ** 2 for x in xs)
    return products / squares if squares else None
