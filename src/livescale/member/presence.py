"""Layers that all ranks of an instance have, as far as rank 0 knows."""

from __future__ import annotations

from collections.abc import Callable


class Presence:
    """`grows` is told each new watermark, `came` each layer that is there behind a missing one."""

    def __init__(
        self, ranks: int, grows: Callable[[int], None], came: Callable[[int], None]
    ) -> None:
        self._grows = grows
        self._came = came
        self._watermarks = [0] * ranks
        self._beyond: list[tuple[int, ...]] = [()] * ranks
        self._told: dict[int, None] = {}

    def has(self, rank: int, watermark: int, beyond: tuple[int, ...] = ()) -> None:
        """The rank has layers 0…watermark-1, and those `beyond`: the instance can run those that
        all ranks have."""
        before = min(self._watermarks)
        self._watermarks[rank] = max(self._watermarks[rank], watermark)
        self._beyond[rank] = beyond
        least = min(self._watermarks)
        if least > before:
            self._grows(least)
        ranks = list(zip(self._watermarks, self._beyond, strict=True))
        for layer in [n for own in self._beyond for n in own if n not in self._told]:
            if all(layer < stop or layer in own for stop, own in ranks):
                self._told[layer] = None
                self._came(layer)
