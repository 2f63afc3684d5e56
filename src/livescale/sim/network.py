"""Fixed-rate network: when each layer of a transfer arrives. Flows do not share links here."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.types import Value

_NS_PER_S = 1_000_000_000


class Network(Value, frozen=True):
    """Rates of all links and of storage, and the unit in which a chain forwards."""

    link_bytes_per_s: int
    storage_bytes_per_s: int
    chunk_bytes: int

    def chunk_ns(self, layer_bytes: Sequence[int]) -> int:
        """How far a target lags behind its sender: the time of one chunk on a link.

        Every hop forwards a chunk as soon as it has it, so a chain of n targets takes
        (chunks + n - 1) / chunks of one copy's time (BlitzScale §5.1).
        """
        return _ns(min(self.chunk_bytes, sum(layer_bytes)), self.link_bytes_per_s)


def _ns(size_bytes: int, bytes_per_s: int) -> int:
    return -(-size_bytes * _NS_PER_S // bytes_per_s)
