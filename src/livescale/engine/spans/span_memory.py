"""Memory of a compiled span: what lies where, for so many lanes and threads."""

from __future__ import annotations

import numpy as np

from livescale.engine.kernels.job import (
    CHUNK,
    CONTEXT,
    GROUP,
    STRETCH,
    TILE,
    UNIT_FIELDS,
    WIDE_ITEMS,
    lanes_of,
)

_CACHE_LINE_BYTES = 64
_SMALLEST_LANES = 32
_PHASES_A_LAYER, _PHASES_AROUND = 8, 8


class SpanMemory:
    """Addresses that the job names, in memory that grows with the largest Run.

    `job` is the record (1) of the kernels, with the sizes of the model filled in.
    """

    def __init__(self, job: np.ndarray, decoder_layers: int) -> None:
        self._job = job
        self._held: dict[str, np.ndarray] = {}
        self._lanes = self._units = self._threads = 0
        phases = decoder_layers * _PHASES_A_LAYER + _PHASES_AROUND
        job["phases"] = phases
        self._place("counters", 8 * phases)
        # What threads count together shares no cache line with anything else.
        self._place("barrier", _CACHE_LINE_BYTES)
        self._place("waited", _CACHE_LINE_BYTES)

    def fit(self, rows: int, units: int, threads: int) -> None:
        """There is room for a Run of so many rows and units of attention by so many threads."""
        if rows > self._lanes or threads != self._threads:
            self._lanes = max(lanes_of(rows), self._lanes, _SMALLEST_LANES)
            self._threads = threads
            self._place_rows()
        if units > self._units:
            self._units = max(units, 2 * self._units)
            self._place_units()

    def integers(self, name: str) -> np.ndarray:
        """What the job has at that address, int64."""
        return self._held[name].view(np.int64)

    def name(self, name: str, array: np.ndarray) -> None:
        """The job knows the array by its address; the array lives as long as no other has the
        name."""
        assert array.flags.c_contiguous, name
        self._held[name] = array
        self._job[name] = array.ctypes.data

    # -- helpers, in the order used -------------------------------------------------------------

    def _place_rows(self) -> None:
        self._job["rows_max"] = self._lanes
        for name in ("token_ids", "positions", "kept", "sample_rows", "chosen"):
            self._place(name, 8 * self._lanes)
        for name, count in self._floats().items():
            self._place(name, 4 * count)
        for name, size_bytes in self._of_threads().items():
            size_bytes = -(-size_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
            self._job[f"{name}_bytes"] = size_bytes
            self._place(name, size_bytes * self._threads)
        self._place("best", 4 * self._threads * self._lanes)
        self._place("best_ids", 8 * self._threads * self._lanes)

    def _floats(self) -> dict[str, int]:
        model, lanes = self._job[0], self._lanes
        queries = int(model["heads"]) * int(model["head_dim"])
        keys = int(model["kv_heads"]) * int(model["head_dim"])
        angles = lanes * int(model["head_dim"]) // 2
        return {
            "residual": lanes * int(model["hidden"]),
            "operand": max(lanes, CHUNK * self._threads) * int(model["hidden"]),
            "sampled": lanes * int(model["hidden"]),
            "projected": lanes * (queries + 2 * keys),
            "attended": lanes * queries,
            "activated": lanes * int(model["intermediate"]),
            "cosines": angles,
            "sines": angles,
        }

    def _of_threads(self) -> dict[str, int]:
        model = self._job[0]
        head_dim = int(model["head_dim"])
        shared = int(model["heads"]) // int(model["kv_heads"])
        features = max(int(model[name]) for name in ("hidden", "intermediate"))
        features = max(features, int(model["heads"]) * head_dim)
        columns = -(-shared // CHUNK) * CHUNK
        decode = (
            head_dim * (columns + STRETCH + shared) + STRETCH * (columns + shared) + 2 * columns
        )
        prompt = 2 * head_dim * (GROUP + CONTEXT) + 2 * CONTEXT * GROUP + 3 * GROUP
        return {
            "wide": 4 * max(WIDE_ITEMS, 4 * features),
            "tiles": 4 * 2 * TILE * self._lanes,
            "attention": 4 * max(decode, prompt),
        }

    def _place_units(self) -> None:
        model, units = self._job[0], self._units
        self._job["units_max"] = units
        self._place("units", 8 * UNIT_FIELDS * units)
        self._place("ready", 8 * int(model["kv_heads"]) * units)
        self._place("partials", 4 * int(model["heads"]) * (int(model["head_dim"]) + 2) * units)

    def _place(self, name: str, size_bytes: int) -> None:
        """Zeros, at the beginning of a cache line: lanes that no row has must hold finite
        values."""
        memory = np.zeros(size_bytes + _CACHE_LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % _CACHE_LINE_BYTES
        self.name(name, memory[start : start + size_bytes])
