"""Prefix residency: which first layers of which models a worker keeps in spare memory.

A worker that gives a model up keeps its first layers behind the place of the assigned model. When
it is given that model again they are there at once, and live execution starts with them (BlitzScale
§5.2 needs the first layer; half of the layers make a pair as fast as two instances). Numbers only:
the bytes are moved by who owns the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.values.types import Value


class Resident(Value, frozen=True):
    """The first `layers` layers of a model, one after the other from `offset_bytes` on."""

    model: str
    layers: int
    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class ResidentLayers:
    """What lies in `[start_bytes, stop_bytes)` of one worker's memory.

    The models that were given up last stay: older ones leave when there is no room.
    """

    def __init__(self, start_bytes: int, stop_bytes: int) -> None:
        assert 0 <= start_bytes <= stop_bytes
        self._start_bytes = start_bytes
        self._stop_bytes = stop_bytes
        #: the longest kept first
        self._kept: dict[str, Resident] = {}

    def keep(self, model: str, layer_bytes: Sequence[int]) -> Resident | None:
        """Make room for the first layers of a model, half of its decoder layers at most.

        `layer_bytes` are those that can be kept: the first ones, each with its padding. None if not
        even the embedding and one layer fit.
        """
        self._kept.pop(model, None)
        half = 1 + -(-(len(layer_bytes) - 2) // 2)
        room_bytes = self._stop_bytes - self._start_bytes
        layers = size_bytes = 0
        while layers < half and size_bytes + layer_bytes[layers] <= room_bytes:
            size_bytes += layer_bytes[layers]
            layers += 1
        if layers < 2:
            return None
        offset_bytes = self._gap(size_bytes)
        while offset_bytes is None:
            del self._kept[next(iter(self._kept))]
            offset_bytes = self._gap(size_bytes)
        kept = self._kept[model] = Resident(model, layers, offset_bytes, size_bytes)
        return kept

    def find(self, model: str) -> Resident | None:
        """What is kept of the model."""
        return self._kept.get(model)

    def make_way(self, stop_bytes: int) -> None:
        """A model takes the memory up to there: what lies in its way is lost."""
        for kept in [k for k in self._kept.values() if k.offset_bytes < stop_bytes]:
            del self._kept[kept.model]

    def _gap(self, size_bytes: int) -> int | None:
        """The lowest place with so many free bytes."""
        offset_bytes = self._start_bytes
        for kept in sorted(self._kept.values(), key=lambda kept: kept.offset_bytes):
            if kept.offset_bytes - offset_bytes >= size_bytes:
                return offset_bytes
            offset_bytes = kept.end_bytes
        return offset_bytes if self._stop_bytes - offset_bytes >= size_bytes else None
