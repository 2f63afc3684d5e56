"""A Run's rows, from its segments: where each lies in the KV cache, and the units that attention is
cut into."""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import compiled, matrix, vector
from livescale.engine.kernels.job import (
    SEGMENT_FIELDS,
    STRETCH,
    UNIT_FIELDS,
    lanes_of,
    rows_of_unit,
)
from livescale.engine.kernels.products import INT64


@compiled(nogil=True)
def arrange(job: Any) -> None:
    """Fills in the job's `rows`, `lanes`, `samples` and `sample_lanes`, and the memory that it
    names: `token_ids`, `positions` and `kept` (places in the KV cache), all (rows); `units`;
    `sample_rows` (samples). Counters begin at 0."""
    prompts = _count_prompt_units(job)
    decodes, rows, samples = prompts, np.int64(0), np.int64(0)
    units = matrix(job[0].units, INT64, job[0].units_max, UNIT_FIELDS)
    sample_rows = vector(job[0].sample_rows, INT64, job[0].rows_max)
    rows_max = _rows_of_unit(job[0].heads // job[0].kv_heads)
    place = job[0].segments
    for _ in range(job[0].segment_count):
        segment = vector(place, INT64, SEGMENT_FIELDS)
        count, context, chooses, blocks = segment[0], segment[1], segment[2], segment[3]
        ids = place + 8 * SEGMENT_FIELDS
        table = ids + 8 * count
        place = table + 8 * blocks
        _fill_rows(job, ids, table, rows, count, context)
        if chooses:
            sample_rows[samples] = rows + count - 1
            samples += 1
        for start in range(0, count, rows_max):
            several = min(rows_max, count - start)
            # A single row is a decode to attention, which needs its stretches.
            if several > 1:
                # The last ones of a prompt are first: these see the most.
                prompts -= 1
                _fill_unit(units[prompts], rows + start, several, table, 0, 1)
                continue
            stretches = (context + start) // STRETCH + 1
            for stretch in range(stretches):
                _fill_unit(units[decodes], rows + start, 1, table, stretch, stretches)
                decodes += 1
        rows += count
    job[0].rows, job[0].lanes, job[0].unit_count = rows, _lanes_of(rows), decodes
    job[0].samples = samples if job[0].chooses else 0
    job[0].sample_lanes = _lanes_of(job[0].samples)
    _clear(job)


# -- helpers, in the order used -----------------------------------------------------------------

_lanes_of, _rows_of_unit = compiled()(lanes_of), compiled()(rows_of_unit)


@compiled()
def _count_prompt_units(job: Any) -> Any:
    total, rows_max = np.int64(0), _rows_of_unit(job[0].heads // job[0].kv_heads)
    place = job[0].segments
    for _ in range(job[0].segment_count):
        segment = vector(place, INT64, SEGMENT_FIELDS)
        count = segment[0]
        if rows_max > 1:
            total += count // rows_max + (count % rows_max > 1)
        place += 8 * (SEGMENT_FIELDS + count + segment[3])
    return total


@compiled()
def _fill_rows(job: Any, ids: Any, table: Any, first: Any, count: Any, context: Any) -> None:
    size = job[0].block_tokens
    token_ids = vector(job[0].token_ids + 8 * first, INT64, count)
    positions = vector(job[0].positions + 8 * first, INT64, count)
    kept = vector(job[0].kept + 8 * first, INT64, count)
    given = vector(ids, INT64, count)
    blocks = vector(table, INT64, (context + count + size - 1) // size)
    for i in range(count):
        position = context + i
        token_ids[i] = given[i]
        positions[i] = position
        kept[i] = blocks[position // size] * size + position % size


@compiled()
def _fill_unit(unit: Any, row: Any, rows: Any, table: Any, stretch: Any, stretches: Any) -> None:
    unit[0], unit[1], unit[2], unit[3], unit[4] = row, rows, table, stretch, stretches


@compiled()
def _clear(job: Any) -> None:
    phases = vector(job[0].counters, INT64, job[0].phases)
    for phase in range(job[0].phases):
        phases[phase] = 0
    ready = vector(job[0].ready, INT64, job[0].unit_count * job[0].kv_heads)
    for unit in range(job[0].unit_count * job[0].kv_heads):
        ready[unit] = 0
    vector(job[0].barrier, INT64, 1)[0] = 0
    vector(job[0].waited, INT64, 1)[0] = 0
