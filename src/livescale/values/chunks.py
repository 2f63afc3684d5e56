"""The chunk grid: how a model's bytes are cut for transfer, and parts of it as values.

Ground floor: arithmetic only. Chunks never cross layers; they are numbered through the whole model,
so that a part of a model is a handful of integers whatever its size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from livescale.values.types import FromWorker, Upstream, Value

CHUNK_RANGES_MAX = 1024
"""Ranges that one feed may list: what is asked over a network must have a bound."""
_CHUNKS_PER_S = 250
"""A link should carry so many: messages of live pairs, rows and KV wait for the one that is being
sent, and a chain's next member for the first."""
_CHUNK_BYTES_MIN = 64 << 10
"""Smaller chunks cost more CPU time than they save."""


class ChunkRange(Value, frozen=True, array_like=True):
    """The chunks `start`, `start + step`, … below `stop`."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.stop and self.step >= 1):
            raise ValueError(f"no chunks are in [{self.start}, {self.stop}) by {self.step}")

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.step)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop, self.step))

    def __contains__(self, chunk: int) -> bool:
        return self.start <= chunk < self.stop and (chunk - self.start) % self.step == 0

    def __str__(self) -> str:
        by = f":{self.step}" if self.step > 1 else ""
        return f"{self.start}-{self.stop - 1}{by}"


class Feed(Value, frozen=True):
    """Chunks that one receiver gets from one holder, in this order.

    The receiver asks for them; the holder sends each as soon as it has it itself. `window` bounds
    the chunks asked for and not yet received (None: all at once), for transfer graphs in which a
    sender must not run ahead (binomial pipelines).
    """

    upstream: Upstream
    chunks: tuple[ChunkRange, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError(f"the feed from {self.upstream} has no chunks")
        if len(self.chunks) > CHUNK_RANGES_MAX:
            raise ValueError(f"a feed lists {len(self.chunks)} ranges, above {CHUNK_RANGES_MAX}")

    def __str__(self) -> str:
        return f"{self.upstream}: {', '.join(map(str, self.chunks))}"


def fitting_chunk_bytes(chunk_bytes: int, rates_bytes_per_s: Iterable[int | None]) -> int:
    """The unit of transfers in a pool: `chunk_bytes`, or less where the slowest of these links is
    slow (None: not known). One unit for all plans of a pool, since copies are told by it."""
    slowest = min((rate for rate in rates_bytes_per_s if rate is not None), default=None)
    if slowest is None:
        return chunk_bytes
    fitting = 1 << max(slowest // _CHUNKS_PER_S, 1).bit_length() - 1
    return min(chunk_bytes, max(fitting, _CHUNK_BYTES_MIN))


class ChunkGrid:
    """Layers of `layer_bytes` cut into chunks of at most `chunk_bytes`.

    A layer without bytes has no chunk. Chunk c of the model is `[offset, offset + size)` of its
    layer.
    """

    def __init__(self, layer_bytes: Sequence[int], chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunks of {chunk_bytes} bytes carry nothing")
        self.layer_bytes = tuple(layer_bytes)
        self.chunk_bytes = chunk_bytes
        #: the first chunk of every layer, and the number of all chunks behind
        self.first = [0]
        for size in self.layer_bytes:
            self.first.append(self.first[-1] + -(-size // chunk_bytes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkGrid):
            return NotImplemented
        return (self.chunk_bytes, self.layer_bytes) == (other.chunk_bytes, other.layer_bytes)

    def __hash__(self) -> int:
        return hash((self.chunk_bytes, self.layer_bytes))

    @property
    def chunks(self) -> int:
        return self.first[-1]

    def layer(self, chunk: int) -> int:
        """The layer that the chunk is a part of."""
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} is not one of {self.chunks}")
        # Layers without chunks begin where their successor does: the last of them is meant.
        return bisect.bisect_right(self.first, chunk) - 1

    def place(self, chunk: int) -> tuple[int, int, int]:
        """(layer, offset in the layer, bytes) of the chunk."""
        layer = self.layer(chunk)
        offset = (chunk - self.first[layer]) * self.chunk_bytes
        return layer, offset, min(self.chunk_bytes, self.layer_bytes[layer] - offset)

    def of_layer(self, layer: int) -> range:
        """The chunks of a layer (none, if it has no bytes)."""
        return range(self.first[layer], self.first[layer + 1])

    def all(self) -> tuple[ChunkRange, ...]:
        """Every chunk in order; empty for a model without bytes."""
        return (ChunkRange(0, self.chunks),) if self.chunks else ()


def ranges_of(chunks: Iterable[int]) -> tuple[ChunkRange, ...]:
    """Few ranges that list these chunks in this order (runs of one step are put together)."""
    found: list[ChunkRange] = []
    run: list[int] = []
    for chunk in chunks:
        if run and not _continues(run, chunk):
            found.append(_range(run))
            run = []
        run.append(chunk)
    if run:
        found.append(_range(run))
    return tuple(found)


def senders(feeds: Iterable[Feed]) -> list[FromWorker]:
    """The workers and agents that these feeds come from, each once, in order."""
    found = {f.upstream: None for f in feeds if isinstance(f.upstream, FromWorker)}
    return sorted(found, key=lambda upstream: upstream.worker)


def _continues(run: list[int], chunk: int) -> bool:
    if len(run) == 1:
        return chunk > run[0]
    return chunk - run[-1] == run[1] - run[0]


def _range(run: list[int]) -> ChunkRange:
    step = run[1] - run[0] if len(run) > 1 else 1
    return ChunkRange(run[0], run[-1] + 1, step)
