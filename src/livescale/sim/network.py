"""Fixed-rate network: when each layer of a transfer arrives. Flows do not share links here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from livescale.types import Value

_NS_PER_S = 1_000_000_000


class Network(Value, frozen=True):
    """Rates of all links and of storage, and the unit in which a chain forwards."""

    link_bytes_per_s: int
    storage_bytes_per_s: int
    chunk_bytes: int

    def chain_arrivals_ns(self, layer_bytes: Sequence[int], place: int) -> tuple[int, ...]:
        """When each layer is complete at the `place`-th target (1 is the first), from the start.

        Every hop forwards a chunk as soon as it has it, so target k lags k - 1 chunks behind the
        first one: the chain takes (chunks + n - 1) / chunks of one copy's time (BlitzScale §5.1).
        """
        lag_bytes = self._lag_bytes(layer_bytes, place)
        totals = itertools.accumulate(layer_bytes)
        return tuple(_ns(total + lag_bytes, self.link_bytes_per_s) for total in totals)

    def first_byte_ns(self, layer_bytes: Sequence[int], place: int) -> int:
        """When the first byte arrives at the `place`-th target of a chain, from the start."""
        return _ns(self._lag_bytes(layer_bytes, place), self.link_bytes_per_s)

    def chunk_ns(self, layer_bytes: Sequence[int]) -> int:
        """How far a target lags behind its sender: the time of one chunk on a link."""
        return _ns(self._lag_bytes(layer_bytes, 2), self.link_bytes_per_s)

    def storage_arrivals_ns(self, layer_bytes: Sequence[int]) -> tuple[int, ...]:
        """When each layer has been read from storage, from the start."""
        totals = itertools.accumulate(layer_bytes)
        return tuple(_ns(total, self.storage_bytes_per_s) for total in totals)

    def _lag_bytes(self, layer_bytes: Sequence[int], place: int) -> int:
        assert place >= 1, place
        return (place - 1) * min(self.chunk_bytes, sum(layer_bytes))


def _ns(size_bytes: int, bytes_per_s: int) -> int:
    return -(-size_bytes * _NS_PER_S // bytes_per_s)
