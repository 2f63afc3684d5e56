"""Measured points and what lies between them: curves and grids that never fall."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

from livescale.values.types import Value


class TimeCurve(Value, frozen=True):
    """Times at increasing sizes, in nanoseconds; between two points on a straight line of logs."""

    at: tuple[int, ...]
    ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.at or len(self.at) != len(self.ns) or self.at[0] < 1 or self.ns[0] < 1:
            raise ValueError(f"a curve needs points at sizes and times from 1 on: {self.at[:1]}")
        _check_rising(self.at)
        if any(later < earlier for earlier, later in pairwise(self.ns)):
            raise ValueError("the times of a curve never fall")

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> TimeCurve:
        """From (size, nanoseconds), made to rise: sizes measured more than once count with their
        mean, and where something was faster than something smaller both get what is between."""
        by_size: dict[int, list[float]] = {}
        for size, ns in points:
            by_size.setdefault(size, []).append(ns)
        means = [math.fsum(by_size[size]) / len(by_size[size]) for size in sorted(by_size)]
        return cls(tuple(sorted(by_size)), _whole(_rising(means)))

    def value(self, size: float) -> float:
        """Nanoseconds at a size; below the first point its time.

        Beyond the last point times grow on the straight line through the last two points, or in
        proportion when there is one only.
        """
        if size <= self.at[0]:
            return float(self.ns[0])
        if size > self.at[-1]:
            if len(self.at) == 1:
                return self.ns[-1] * size / self.at[-1]
            return line(self.at[-2], self.at[-1], self.ns[-2], self.ns[-1], size)
        right = bisect_left(self.at, size)
        weight = log_weight(self.at[right - 1], self.at[right], size)
        return between(self.ns[right - 1], self.ns[right], weight)


class TimeGrid(Value, frozen=True):
    """Times by batch and size; `rows` has the times at every `at` of each batch."""

    batches: tuple[int, ...]
    at: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _check_rising(self.batches)
        _check_rising(self.at)
        if len(self.rows) != len(self.batches) or not self.rows:
            raise ValueError("a grid has one row per batch")
        if any(len(row) != len(self.at) or row[0] < 1 for row in self.rows):
            raise ValueError("a row has one time, of at least 1 ns, per size")

    @classmethod
    def of(cls, points: Iterable[tuple[int, int, float]]) -> TimeGrid:
        """From (batch, size, nanoseconds), where large batches may end at smaller sizes: holes
        are filled as `TimeCurve.value` goes on. Times never fall, neither by size nor by batch."""
        by_batch: dict[int, list[tuple[int, float]]] = {}
        for batch, size, ns in points:
            by_batch.setdefault(batch, []).append((size, ns))
        batches = sorted(by_batch)
        sizes = sorted({size for row in by_batch.values() for size, _ in row})
        rows = []
        for batch in batches:
            curve = TimeCurve.of(by_batch[batch])
            rows.append([curve.value(size) for size in sizes])
        # Each row rises; making each column rise, too, keeps an order that all columns have.
        columns = [_whole(_rising(column)) for column in zip(*rows, strict=True)]
        return cls(tuple(batches), tuple(sizes), tuple(zip(*columns, strict=True)))

    def value(self, batch: float, size: float) -> float:
        """Nanoseconds at (batch, size), linear in logs inside; outside as `TimeCurve.value`."""
        batches = self.batches
        if batch <= batches[0]:
            return self._row_value(0, size)
        if batch <= batches[-1]:
            right = bisect_left(batches, batch)
            weight = log_weight(batches[right - 1], batches[right], batch)
            return between(self._row_value(right - 1, size), self._row_value(right, size), weight)
        last_ns = self._row_value(len(batches) - 1, size)
        if len(batches) == 1:
            return last_ns * batch / batches[0]
        return last_ns + (batch - batches[-1]) * self._batch_ns(size)

    def _row_value(self, number: int, size: float) -> float:
        at, row = self.at, self.rows[number]
        if size <= at[0]:
            return float(row[0])
        if size <= at[-1]:
            right = bisect_left(at, size)
            return between(row[right - 1], row[right], log_weight(at[right - 1], at[right], size))
        if len(at) == 1:
            return row[-1] * size / at[-1]
        # Of rows that are measured apart, one may rise less than those of smaller batches.
        rows = self.rows[: number + 1]
        return max(line(at[-2], at[-1], row[-2], row[-1], size) for row in rows)

    def _batch_ns(self, size: float) -> float:
        """What one more sequence takes beyond the largest batch: as from the last batch but one to
        it, at whatever size up to this one that was most."""
        before, last = self.rows[-2:]
        columns = max(1, bisect_right(self.at, size))
        rises = (last[column] - before[column] for column in range(columns))
        return max(rises) / (self.batches[-1] - self.batches[-2])


def log_weight(left: float, right: float, value: float) -> float:
    """How far `value` is from left (0) to right (1), in logs."""
    return math.log(value / left) / math.log(right / left)


def between(left: float, right: float, weight: float) -> float:
    """From left (0) to right (1), in logs."""
    return left * math.exp(weight * math.log(right / left))


def line(left: float, right: float, left_ns: float, right_ns: float, size: float) -> float:
    """The straight line through two points, at a size beyond both."""
    return right_ns + (right_ns - left_ns) * (size - right) / (right - left)


def _rising(values: Iterable[float]) -> list[float]:
    """The closest values that never fall: isotonic regression of the logs, by pooling adjacent
    violators (Ayer et al., 1955). A single outlier among many points moves little."""
    pools: list[tuple[float, int]] = []  # (mean log, how many values)
    for value in values:
        mean, count = math.log(max(value, 1.0)), 1
        while pools and pools[-1][0] > mean:
            before, earlier = pools.pop()
            mean = (mean * count + before * earlier) / (count + earlier)
            count += earlier
        pools.append((mean, count))
    return [math.exp(mean) for mean, count in pools for _ in range(count)]


def _whole(values: Iterable[float]) -> tuple[int, ...]:
    return tuple(max(1, round(value)) for value in values)


def _check_rising(sizes: tuple[int, ...]) -> None:
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError("sizes must increase")
