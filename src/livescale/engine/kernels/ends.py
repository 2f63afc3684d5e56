"""Where a span ends: hidden rows for the next one, or logits and the highest of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import as_bf16, compiled, matrix, vector
from livescale.engine.kernels.job import GROUP, width_of
from livescale.engine.kernels.norms import norm, own_operand
from livescale.engine.kernels.products import BF16, FP32, INT64, multiply, tile_rows
from livescale.engine.kernels.team import meet, take


@compiled()
def give_rows(job: Any, lanes: Any, phase: Any) -> None:
    """The lanes of the residual become rows in the type of the weights."""
    hidden = job[0].hidden
    while True:
        row = take(job, phase)
        if row >= job[0].rows:
            break
        x, lane = _lane_of(job, lanes, row)
        place = job[0].rows_out + row * hidden * job[0].item_bytes
        narrow, plain = vector(place, BF16, hidden), vector(place, FP32, hidden)
        for k in range(hidden):
            if job[0].item_bytes == 2:
                narrow[k] = as_bf16(x[k, lane])
            else:
                plain[k] = x[k, lane]
    meet(job, phase)


@compiled()
def choose(job: Any, like: Any, me: Any, lanes: Any, phase: Any) -> None:
    """Of each row that samples, the token with the highest logit, of equal ones the lowest id; the
    logits (samples, vocabulary), too, if there is a place for them."""
    _gather_samples(job, lanes, phase)
    phase = meet(job, phase)
    chosen_lanes = job[0].sample_lanes
    phase = norm(job, like, me, job[0].final_norm, job[0].sampled, chosen_lanes, phase)
    _multiply_head(job, like, me, chosen_lanes, phase)
    meet(job, phase)
    if me == 0:
        _compare_threads(job, chosen_lanes)


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _lane_of(job: Any, lanes: Any, row: Any) -> Any:
    """The group's residual (hidden, width), and which of its lanes a row is."""
    group = row // GROUP
    before = group * GROUP
    place = job[0].residual + before * job[0].hidden * 4
    return matrix(place, FP32, job[0].hidden, width_of(lanes, group)), row - before


@compiled()
def _gather_samples(job: Any, lanes: Any, phase: Any) -> None:
    """Rows that sample are the lanes of an activation of their own."""
    hidden, all_lanes = job[0].hidden, job[0].sample_lanes
    rows = vector(job[0].sample_rows, INT64, job[0].samples)
    while True:
        number = take(job, phase)
        if number >= all_lanes:
            break
        group = number // GROUP
        before = group * GROUP
        out = matrix(job[0].sampled + before * hidden * 4, FP32, hidden, width_of(all_lanes, group))
        if number < job[0].samples:
            x, lane = _lane_of(job, lanes, rows[number])
            for k in range(hidden):
                out[k, number - before] = x[k, lane]
        else:
            for k in range(hidden):
                out[k, number - before] = np.float32(0)


@compiled()
def _multiply_head(job: Any, like: Any, me: Any, lanes: Any, phase: Any) -> None:
    """Logits, a tile of the vocabulary after the other; `best` and `best_ids` (threads, lanes) have
    the thread's highest."""
    hidden, vocabulary = job[0].hidden, job[0].vocabulary
    best = vector(job[0].best + 4 * me * lanes, FP32, lanes)
    best_ids = vector(job[0].best_ids + 8 * me * lanes, INT64, lanes)
    for lane in range(lanes):
        best[lane] = np.float32(-np.inf)
        best_ids[lane] = 0
    tile = job[0].tiles + me * job[0].tiles_bytes
    highest = vector(job[0].attention + me * job[0].attention_bytes, FP32, GROUP)
    operand = own_operand(job, me, lanes)
    step = tile_rows(job, vocabulary, hidden)
    while True:
        first = take(job, phase) * step
        if first >= vocabulary:
            break
        count = min(step, vocabulary - first)
        multiply(
            job, like, me, job[0].head, hidden, first, count, operand, lanes,
            tile, count, 0, 0,
        )  # fmt: skip
        for group in range((lanes + GROUP - 1) // GROUP):
            before = group * GROUP
            width = width_of(lanes, group)
            logits = matrix(tile + before * count * 4, FP32, count, width)
            _note_highest(logits, first, best[before:], best_ids[before:], highest)
            if job[0].logits:
                _copy_logits(job, logits, first, before)


@compiled()
def _note_highest(logits: Any, first: Any, best: Any, best_ids: Any, highest: Any) -> None:
    """`best` and `best_ids` of each lane after some more `logits` (tokens, lanes), whose ids begin
    at `first`. Few tiles have a new highest one: only there is its row looked for."""
    rows, width = logits.shape
    for lane in range(width):
        highest[lane] = logits[0, lane]
    for row in range(1, rows):
        for lane in range(width):
            highest[lane] = max(highest[lane], logits[row, lane])
    for lane in range(width):
        if highest[lane] > best[lane]:
            best[lane] = highest[lane]
            row = 0
            while row < rows - 1 and logits[row, lane] != highest[lane]:
                row += 1
            best_ids[lane] = first + row


@compiled()
def _copy_logits(job: Any, logits: Any, first: Any, before: Any) -> None:
    rows, width = logits.shape
    out = matrix(job[0].logits, FP32, job[0].samples, job[0].vocabulary)
    for lane in range(min(width, job[0].samples - before)):
        for row in range(rows):
            out[before + lane, first + row] = logits[row, lane]


@compiled()
def _compare_threads(job: Any, lanes: Any) -> None:
    best = matrix(job[0].best, FP32, job[0].threads, lanes)
    best_ids = matrix(job[0].best_ids, INT64, job[0].threads, lanes)
    chosen = vector(job[0].chosen, INT64, job[0].samples)
    for lane in range(job[0].samples):
        winner = 0
        for thread in range(1, job[0].threads):
            value, highest = best[thread, lane], best[winner, lane]
            is_first = best_ids[thread, lane] < best_ids[winner, lane]
            if value > highest or (value == highest and is_first):
                winner = thread
        chosen[lane] = best_ids[winner, lane]
