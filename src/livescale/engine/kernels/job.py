"""What the threads of a span know: one record for the Run, one for each layer. Sizes are in items,
addresses in bytes from 0; an address of 0 stands for what a model does not have.

Rows of a Run are *lanes*: an activation lies as (features, lanes), so that every loop over lanes is
vectors and a product is weights times activation, with the weights as they lie in the arena. Lanes
come in groups of `GROUP`, one group behind the other; the last one is as wide as its rows need.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import compiled

GROUP = 128
"""Lanes that a product takes at once: their activation fits into a core's cache."""

CHUNK, FEW = 16, 8
"""Lanes that one thread takes in a step over features; a group has one lane, `FEW`, or a multiple
of `CHUNK`."""

STRETCH = 256
"""Positions of a decode's context that one thread reads."""

CONTEXT = 64
"""Positions of a prompt's context that are multiplied at once."""

TILE = 64
"""Most rows of weights that are multiplied at once."""

WIDE_ITEMS = 1 << 16
"""Weights that are widened to fp32 at once: 256 KiB."""

SEGMENT_FIELDS = 4
"""Of a segment: rows, positions before them, whether its last row samples, blocks. Its token ids
and its block table follow."""

UNIT_FIELDS = 5
"""Of a unit of attention: its first row, rows, address of the segment's block table, stretch of the
context, stretches."""

_MODEL = "hidden heads kv_heads head_dim intermediate vocabulary places block_tokens"
_TYPES = "is_paired item_bytes operand_bytes"
_FUNCTIONS = "fp32_product bf16_product release wait post yield_core clock"
_THREADS = "threads is_over wake done barrier waited counters phases"
_SCRATCH = "wide wide_bytes tiles tiles_bytes attention attention_bytes"
_ACTIVATIONS = "residual operand projected attended activated sampled cosines sines"
_ROWS = "rows_max rows lanes token_ids positions kept"
_ATTENTION = "units_max units unit_count partials ready cosine_table sine_table"
_TIMES = "is_timed product_ticks attention_ticks"
_HEAD = "embedding final_norm head samples sample_lanes sample_rows best best_ids chosen"
ORDER = "segments segment_count first stop begins gives_rows chooses rows_in rows_out logits"

JOB = np.dtype(
    [
        *(
            (name, np.int64)
            for names in (
                _MODEL,
                _TYPES,
                _FUNCTIONS,
                _THREADS,
                _SCRATCH,
                _ACTIVATIONS,
                _ROWS,
                _ATTENTION,
                _HEAD,
                _TIMES,
                ORDER,
            )
            for name in names.split()
        ),
        ("epsilon", np.float32),
        ("scaling", np.float32),
    ]
)
"""Sizes of the model; how weights and operands lie; functions of C; the team; memory of each
thread; activations; rows of the Run; its attention; its choice of tokens; the first thread's time,
if wanted; what the caller orders (an address of 0: rows are not given, not wanted, no logits)."""

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("input_norm", "q", "k", "v", "out", "q_bias", "k_bias", "v_bias", "out_bias"),
            *("q_norm", "k_norm", "mlp_norm", "gate", "up", "down"),
            *("gate_bias", "up_bias", "down_bias", "keys", "values", "window"),
        )
    ]
)
"""Addresses of a layer's parameters and of its part of the KV cache; `window` 0 sees all."""


def lanes_of(rows: int) -> int:
    """Lanes that so many rows take: few sizes, because a product is compiled for each."""
    if rows <= 1:
        return rows
    return FEW if rows <= FEW else -(-rows // CHUNK) * CHUNK


def rows_of_unit(shared: int) -> int:
    """At most so many rows of a prompt are attended to at once, where `shared` query heads have one
    KV head."""
    return max(GROUP // shared, 1)


@compiled()
def width_of(lanes: Any, group: Any) -> Any:
    """Lanes of the group."""
    return min(GROUP, lanes - group * GROUP)


@compiled()
def lane_of(rows: Any, features: Any, lane: Any, lanes: Any) -> Any:
    """Where the first of a lane's features lies in `rows` (features, lanes), fp32, and how many
    items lie from one feature to the next."""
    group = lane // GROUP
    before = group * GROUP
    return rows + 4 * (before * features + lane - before), width_of(lanes, group)
