"""A Run through a span of layers in one call: Llama, Mistral, Qwen2, Qwen3.

All threads of a team run the same function and share each phase's pieces (`team.py`); between two
phases they meet. What a phase reads was written before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.attention import attend_stretch
from livescale.engine.kernels.compiled import (
    as_float,
    call_with_address,
    clock_ns,
    compiled,
    matrix,
    ticks,
    vector,
)
from livescale.engine.kernels.ends import choose, give_rows
from livescale.engine.kernels.heads import turn_and_keep, turn_angles
from livescale.engine.kernels.job import CHUNK, GROUP, TILE, UNIT_FIELDS, width_of
from livescale.engine.kernels.norms import activate, chunks_of, norm, own_operand
from livescale.engine.kernels.products import (
    FP32,
    INT64,
    add_bias,
    multiply,
    tile_rows,
    tiles_of,
)
from livescale.engine.kernels.prompt_blocks import attend_prompt
from livescale.engine.kernels.rows import arrange
from livescale.engine.kernels.team import (
    SEMAPHORE_BYTES,
    meet,
    take,
    wait_for,
    wait_for_all,
    wake_all,
)


@compiled(nogil=True)
def lead(job: Any, layers: Any, like: Any) -> Any:
    """What the job orders, as the first thread of its team: `like` is of the type of the weights,
    float32, or int16 for bf16. Returns, when all threads have ended, their time and that in which
    they waited for each other, ns, summed over threads."""
    begun_ns = clock_ns(job[0].clock)
    arrange(job)
    wake_all(job)
    _run_span(job, layers, like, 0)
    wait_for_all(job)
    took_ns = (clock_ns(job[0].clock) - begun_ns) * job[0].threads
    return took_ns, vector(job[0].waited, INT64, 1)[0]


@compiled(nogil=True)
def serve(job: Any, layers: Any, like: Any, me: Any) -> None:
    """What thread `me`, other than the first, does until the team is over."""
    place = SEMAPHORE_BYTES * (me - 1)
    while True:
        wait_for(job, job[0].wake + place)
        if job[0].is_over:
            return
        _run_span(job, layers, like, me)
        call_with_address(job[0].post, job[0].done + place)


@compiled()
def clock() -> Any:
    """For what is to be compared with the times in a job."""
    return ticks()


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _run_span(job: Any, layers: Any, like: Any, me: Any) -> None:
    lanes = job[0].lanes
    phase = np.int64(0)
    if job[0].begins:
        phase = _begin(job, like, lanes, phase)
    for number in range(job[0].first, job[0].stop):
        layer = layers[number]
        phase = _attention(job, layer, like, me, lanes, phase)
        phase = _mlp(job, layer, like, me, lanes, phase)
    if job[0].gives_rows:
        give_rows(job, lanes, phase)
    elif job[0].samples:
        choose(job, like, me, lanes, phase)
    if job[0].release:
        call_with_address(job[0].release, 1)


@compiled()
def _begin(job: Any, like: Any, lanes: Any, phase: Any) -> Any:
    """Rows become lanes: of the embedding, or of the hidden rows given."""
    hidden = job[0].hidden
    while True:
        chunk = take(job, phase)
        if chunk >= chunks_of(lanes):
            break
        group = chunk * CHUNK // GROUP
        before = group * GROUP
        width = width_of(lanes, group)
        out = matrix(job[0].residual + before * hidden * 4, FP32, hidden, width)
        first = chunk * CHUNK
        for lane in range(first, min(first + CHUNK, before + width)):
            if lane >= job[0].rows:
                for k in range(hidden):
                    out[k, lane - before] = np.float32(0)
                continue
            source = job[0].rows_in + lane * hidden * job[0].item_bytes
            if job[0].rows_in == 0:
                token_id = vector(job[0].token_ids, INT64, job[0].rows)[lane]
                source = job[0].embedding + token_id * hidden * job[0].item_bytes
            row = vector(source, like, hidden)
            for k in range(hidden):
                out[k, lane - before] = as_float(row[k])
        if chunk * CHUNK == before:
            turn_angles(job, lanes, group)
    return meet(job, phase)


@compiled()
def _attention(job: Any, layer: Any, like: Any, me: Any, lanes: Any, phase: Any) -> Any:
    phase = norm(job, like, me, layer.input_norm, job[0].residual, lanes, phase)
    phase = _project(job, layer, like, me, lanes, phase)
    if job[0].rows > job[0].segment_count:
        phase = _turn(job, layer, like, lanes, phase)
    begun = ticks() if job[0].is_timed else 0
    units = matrix(job[0].units, INT64, job[0].unit_count, UNIT_FIELDS)
    while True:
        piece = take(job, phase)
        number, kv_head = piece // job[0].kv_heads, piece % job[0].kv_heads
        if number >= job[0].unit_count:
            break
        unit = units[number]
        if unit[1] > 1:
            attend_prompt(job, layer, like, me, lanes, unit, kv_head)
        else:
            attend_stretch(job, layer, like, me, lanes, unit, number - unit[3], kv_head)
    if me == 0 and job[0].is_timed:
        job[0].attention_ticks += ticks() - begun
    phase = meet(job, phase)
    features = job[0].heads * job[0].head_dim
    return _add_product(
        job, like, me, layer.out, layer.out_bias, features, job[0].attended, lanes, phase
    )


@compiled()
def _turn(job: Any, layer: Any, like: Any, lanes: Any, phase: Any) -> Any:
    """Rows of a prompt see each other's keys: all are kept before any is attended to."""
    groups = (lanes + GROUP - 1) // GROUP
    while True:
        piece = take(job, phase)
        if piece >= groups * job[0].kv_heads:
            break
        turn_and_keep(job, layer, like, lanes, piece // job[0].kv_heads, piece % job[0].kv_heads)
    return meet(job, phase)


@compiled()
def _project(job: Any, layer: Any, like: Any, me: Any, lanes: Any, phase: Any) -> Any:
    """Queries, keys and values: three matrices, whose tiles are shared as those of one."""
    hidden = job[0].hidden
    wide, narrow = job[0].heads * job[0].head_dim, job[0].kv_heads * job[0].head_dim
    rows = wide + 2 * narrow
    operand = own_operand(job, me, lanes)
    of_q, of_k = tiles_of(job, wide, hidden), tiles_of(job, narrow, hidden)
    while True:
        tile = take(job, phase)
        if tile >= of_q + 2 * of_k:
            break
        weights, bias, out, before = layer.q, layer.q_bias, wide, np.int64(0)
        if tile >= of_q:
            tile -= of_q
            weights, bias, out, before = layer.k, layer.k_bias, narrow, wide
            if tile >= of_k:
                tile -= of_k
                weights, bias, before = layer.v, layer.v_bias, wide + narrow
        step = tile_rows(job, out, hidden)
        first = tile * step
        count = min(step, out - first)
        multiply(
            job, like, me, weights, hidden, first, count, operand, lanes,
            job[0].projected, rows, before + first, 0,
        )  # fmt: skip
        if bias:
            add_bias(like, bias, first, count, lanes, job[0].projected, rows, before + first)
    return meet(job, phase)


@compiled()
def _add_product(
    job: Any,
    like: Any,
    me: Any,
    weights: Any,
    bias: Any,
    features: Any,
    operand: Any,
    lanes: Any,
    phase: Any,
) -> Any:
    """The residual grows by weights (hidden, features) times operand (features, lanes)."""
    hidden = job[0].hidden
    step = tile_rows(job, hidden, features)
    while True:
        first = take(job, phase) * step
        if first >= hidden:
            break
        count = min(step, hidden - first)
        multiply(
            job, like, me, weights, features, first, count, operand, lanes,
            job[0].residual, hidden, first, 1,
        )  # fmt: skip
        if bias:
            add_bias(like, bias, first, count, lanes, job[0].residual, hidden, first)
    return meet(job, phase)


@compiled()
def _mlp(job: Any, layer: Any, like: Any, me: Any, lanes: Any, phase: Any) -> Any:
    phase = norm(job, like, me, layer.mlp_norm, job[0].residual, lanes, phase)
    hidden, width = job[0].hidden, job[0].intermediate
    step = tile_rows(job, width, hidden)
    gate = job[0].tiles + me * job[0].tiles_bytes
    up = gate + TILE * lanes * 4
    operand = own_operand(job, me, lanes)
    while True:
        first = take(job, phase) * step
        if first >= width:
            break
        count = min(step, width - first)
        multiply(
            job, like, me, layer.gate, hidden, first, count, operand, lanes,
            gate, count, 0, 0,
        )  # fmt: skip
        multiply(
            job, like, me, layer.up, hidden, first, count, operand, lanes,
            up, count, 0, 0,
        )  # fmt: skip
        if layer.gate_bias:
            add_bias(like, layer.gate_bias, first, count, lanes, gate, count, 0)
            add_bias(like, layer.up_bias, first, count, lanes, up, count, 0)
        activate(job, gate, up, count, first, count, lanes, job[0].activated)
    phase = meet(job, phase)
    return _add_product(
        job, like, me, layer.down, layer.down_bias, width, job[0].activated, lanes, phase
    )
