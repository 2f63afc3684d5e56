"""A Run as the kernels take it: its segments in one stretch of memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from livescale.batching.runs.run import Run
from livescale.engine.kernels.job import STRETCH, rows_of_unit


@dataclass(frozen=True, slots=True)
class SpanRows:
    """`segments`: of each one `SEGMENT_FIELDS`, its token ids and its block table, int64. And what
    they come to: `rows`, at most so many `units` of attention, `positions` from 0 on, `samples`."""

    segments: array[int]
    rows: int
    units: int
    positions: int
    samples: int


def span_rows(run: Run, shared: int, vocabulary: int) -> SpanRows:
    """The Run's segments; `shared` query heads have one KV head. What follows from them is computed
    in the call (`kernels/rows.py`). Raises IndexError for token ids beyond the `vocabulary`: a
    kernel would read whatever lies there."""
    flat: list[int] = []
    rows = units = positions = samples = 0
    rows_max = rows_of_unit(shared)
    for segment in run.segments:
        ids, table, chooses = segment.token_ids, segment.block_table, segment.chooses
        count, context = len(ids), segment.first_position
        if min(ids) < 0 or max(ids) >= vocabulary:
            foreign = next(i for i in ids if not 0 <= i < vocabulary)
            raise IndexError(f"token id {foreign} of a model that has {vocabulary}")
        flat += (count, context, chooses, len(table))
        flat += ids
        flat += table
        rows += count
        positions = max(positions, context + count)
        samples += chooses
        # At most one row of a segment is left over and read in stretches; all, if a unit is one.
        alone = 1 if rows_max > 1 else count
        units += count // rows_max + alone * ((context + count) // STRETCH + 1)
    return SpanRows(array("q", flat), rows, units, positions, samples)
