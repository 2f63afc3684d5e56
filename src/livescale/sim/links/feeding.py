"""Parts of layers on their way, as bit sets: what a feed brings of which layer, in which order.

Arithmetic only. A layer's chunks are bits of one integer, so that the cost does not grow with the
number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.values.chunks import ChunkGrid, ChunkRange


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """What a feed brings of one layer at a time; bit c is the layer's chunk c."""

    layer: int
    chunks: int


def pieces_of(grid: ChunkGrid, ranges: Sequence[ChunkRange]) -> list[LayerPiece]:
    """The parts of layers that these chunks are, in order."""
    pieces = []
    for part in ranges:
        for layer in range(grid.layer(part.start), grid.layer(part.stop - 1) + 1):
            chunks = _bits(part, grid.first[layer], grid.first[layer + 1])
            if chunks:
                pieces.append(LayerPiece(layer, chunks))
    return pieces


def all_chunks(grid: ChunkGrid) -> list[int]:
    """Per layer, the bits of all its chunks."""
    return [(1 << len(grid.of_layer(layer))) - 1 for layer in range(len(grid.layer_bytes))]


def bytes_in(grid: ChunkGrid, piece: LayerPiece) -> int:
    """The last chunk of a layer may be shorter than the others."""
    count = len(grid.of_layer(piece.layer))
    size = piece.chunks.bit_count() * grid.chunk_bytes
    if piece.chunks >> (count - 1) & 1:
        size -= count * grid.chunk_bytes - grid.layer_bytes[piece.layer]
    return size


def lowest(bits: int, count: int) -> int:
    """The lowest `count` of the bits that are set (all of them, if they are fewer)."""
    low, high = 0, bits.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (bits & ((1 << middle) - 1)).bit_count() >= count:
            high = middle
        else:
            low = middle + 1
    return bits & ((1 << low) - 1)


def _bits(part: ChunkRange, first: int, stop: int) -> int:
    """The chunks of `part` in `[first, stop)`, as bits from `first` on."""
    begin = max(part.start, first)
    begin += (part.start - begin) % part.step
    end = min(part.stop, stop)
    if begin >= end:
        return 0
    count = -(-(end - begin) // part.step)
    # 1 + 2^step + 2^(2 step) + … is a geometric series.
    series: int = ((1 << (part.step * count)) - 1) // ((1 << part.step) - 1)
    return series << (begin - first)
