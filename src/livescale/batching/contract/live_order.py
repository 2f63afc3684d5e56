"""Live orders: which layers a loading instance runs next, and which batch its source takes over.

A loading instance (the target) has the first `loaded` of `layers` decoder layers and a line of
prefill batches, the earliest first. An overloaded instance (the source) has all layers, pulls
batches out of that line and finishes them. An order decides for both, from what each batch has
done; it takes microseconds and knows no times. Baselines are orders, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.values.routes import OVERLAP


@dataclass(slots=True)
class Progress:
    """Where one batch stands: decoder layers that the target has run of it, and whether it ever
    had its turn there. `is_running`: the target is inside a layer of it."""

    layers_done: int = 0
    had_turn: bool = False
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What the target runs next: so many layers of the batch with this index in the line."""

    batch: int
    layers: int


class LiveOrder(Protocol):
    """One way to share batches between target and source."""

    @property
    def name(self) -> str: ...

    @property
    def is_live(self) -> bool:
        """The target runs layers before all of them are there."""
        ...

    def target_turn(self, line: Sequence[Progress], loaded: int, layers: int) -> Turn | None:
        """What the target does now, being free (None: it waits for a layer or a batch)."""
        ...

    def source_pull(self, line: Sequence[Progress], loaded: int, layers: int) -> int | None:
        """The batch that the source takes over now, being free. None: it waits, or there is none
        for it."""
        ...


class ZigZag:
    """BlitzScale's ILP-free scheduling (§5.2, Figure 16).

    The target runs one layer of the earliest batch that has loaded layers which it has not run, so
    that a layer that arrives draws it back to the head of the line. The source pulls the earliest
    batch, whatever was done of it, and finishes it. When everything is loaded a last batch that
    the target has begun stays with it: there is nothing else that it could do meanwhile.
    """

    name = "zigzag"
    is_live = True

    def target_turn(self, line: Sequence[Progress], loaded: int, layers: int) -> Turn | None:
        for index, batch in enumerate(line):
            if batch.layers_done < loaded:
                return Turn(index, 1)
        return None

    def source_pull(self, line: Sequence[Progress], loaded: int, layers: int) -> int | None:
        if not line or line[0].is_running:
            return None
        stays = loaded == layers and len(line) == 1 and line[0].had_turn
        return None if stays else 0


class BestEffort:
    """The simple way (BlitzScale Figure 15 a): every batch has one turn on the target, with all
    layers that are there by then, but never more than half of the model; then it waits for the
    source. When everything is loaded both finish what is in the line; a first batch that had its
    turn is the source's."""

    name = "best-effort"
    is_live = True

    def target_turn(self, line: Sequence[Progress], loaded: int, layers: int) -> Turn | None:
        is_full = loaded == layers
        count = layers if is_full else min(loaded, layers // 2)
        for index, batch in enumerate(line):
            if count and (not batch.had_turn or (is_full and index)):
                return Turn(index, count - batch.layers_done)
        return None

    def source_pull(self, line: Sequence[Progress], loaded: int, layers: int) -> int | None:
        waits_for_turn = 0 < loaded < layers
        for index, batch in enumerate(line):
            if not batch.is_running and (batch.had_turn or not waits_for_turn):
                return index
        return None


class Overlap:
    """The target runs every layer as it arrives and finishes alone (PipeSwitch, OSDI'20; DeepPlan,
    EuroSys'23): what is left of live execution where no instance can be helped."""

    name = OVERLAP
    is_live = True

    def target_turn(self, line: Sequence[Progress], loaded: int, layers: int) -> Turn | None:
        return ZIGZAG.target_turn(line, loaded, layers)

    def source_pull(self, line: Sequence[Progress], loaded: int, layers: int) -> int | None:
        return None


class StopTheWorld:
    """The target does nothing before everything is loaded; the source takes what it can."""

    name = "stop-the-world"
    is_live = False

    def target_turn(self, line: Sequence[Progress], loaded: int, layers: int) -> Turn | None:
        for index, batch in enumerate(line) if loaded == layers else ():
            if batch.layers_done < layers:
                return Turn(index, layers - batch.layers_done)
        return None

    def source_pull(self, line: Sequence[Progress], loaded: int, layers: int) -> int | None:
        for index, batch in enumerate(line):
            if not batch.had_turn and not batch.is_running:
                return index
        return None


ZIGZAG = ZigZag()
LIVE_ORDERS: dict[str, LiveOrder] = {
    order.name: order for order in (ZIGZAG, BestEffort(), Overlap(), StopTheWorld())
}
"""Every order by its name."""
