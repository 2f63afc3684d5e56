"""Two machines that share prefill batches in a live order, in virtual time.

The target has the first layers of a model and gets the others at given times, the source has all.
This is what an order could do at best: without a network, whatever one machine finishes the other
knows at once. `pair_world.py` is the same with the production protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.batching.contract.live_order import LiveOrder, Progress


@dataclass(frozen=True, slots=True)
class Stretch:
    """Decoder layers `[first_layer, first_layer + layers)` (from 0) of one batch, run without a
    pause."""

    on_target: bool
    batch: int
    first_layer: int
    layers: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class LivePlay:
    """What came of it: per batch when its last layer was done, and everything that was run, in
    the order of its begin."""

    finished_ns: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @property
    def last_ns(self) -> int:
        return max(self.finished_ns)

    @property
    def mean_ns(self) -> float:
        """Mean time to the first token, as all batches wait from 0 on."""
        return sum(self.finished_ns) / len(self.finished_ns)

    @property
    def target_layers(self) -> tuple[int, ...]:
        """How many layers of each batch the target ran: BlitzScale's T_i."""
        counts = [0] * len(self.finished_ns)
        for stretch in self.stretches:
            counts[stretch.batch] += stretch.layers * stretch.on_target
        return tuple(counts)


@dataclass(slots=True)
class NumberedBatch(Progress):
    """What orders are shown of a batch: its number counts from 0."""

    number: int = 0


def play(
    order: LiveOrder,
    layers: int,
    layer_ns: Sequence[int],
    loaded_ns: Sequence[int],
    *,
    has_source: bool = True,
) -> LivePlay:
    """Batches that all wait from 0 on, shared in an order. Without a source the target is alone.

    `layer_ns` is what one layer of each batch takes. `loaded_ns[m]` is when the target can run its
    decoder layer m (from 0, not falling; those beyond the last given never come). Layers that
    arrive and Runs that end at one time are known before anything begins, and the source chooses
    first.
    """
    if list(loaded_ns) != sorted(loaded_ns) or len(loaded_ns) > layers:
        raise ValueError(f"{list(loaded_ns)}: rising times of at most {layers} layers")
    line = [NumberedBatch(number=number) for number in range(len(layer_ns))]
    return _Machines(order, layers, layer_ns, loaded_ns, has_source, line).play()


def loaded_every(layer_ns: int, layers: int) -> tuple[int, ...]:
    """Load times of layers that arrive at a steady pace, where the first is there at 0 (BlitzScale
    Figure 15)."""
    return tuple(layer_ns * m for m in range(layers))


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(slots=True)
class _Machines:
    """Both machines, and the time."""

    order: LiveOrder
    layers: int
    layer_ns: Sequence[int]
    loaded_ns: Sequence[int]
    has_source: bool
    #: what neither machine has finished nor the source taken
    line: list[NumberedBatch]
    finished: dict[int, int] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    #: by machine (on_target), what it is in
    running: dict[bool, Stretch | None] = field(default_factory=lambda: {False: None, True: None})
    now_ns: int = 0

    def play(self) -> LivePlay:
        while len(self.finished) < len(self.layer_ns):
            for on_target in (False, True):
                self._end(on_target)
            loaded = sum(at_ns <= self.now_ns for at_ns in self.loaded_ns)
            self._begin_source(loaded)
            self._begin_target(loaded)
            coming = [at_ns for at_ns in self.loaded_ns if at_ns > self.now_ns]
            coming += [stretch.stop_ns for stretch in self.running.values() if stretch is not None]
            if coming:
                self.now_ns = min(coming)
            elif len(self.finished) < len(self.layer_ns):
                waiting = [batch.number for batch in self.line]
                raise ValueError(f"batches {waiting} wait for layers that never come")
        ends = tuple(self.finished[number] for number in range(len(self.layer_ns)))
        return LivePlay(ends, tuple(self.stretches))

    def _end(self, on_target: bool) -> None:
        stretch = self.running[on_target]
        if stretch is None or stretch.stop_ns > self.now_ns:
            return
        self.running[on_target] = None
        if not on_target:
            self.finished[stretch.batch] = self.now_ns
            return
        batch = next(b for b in self.line if b.number == stretch.batch)
        batch.layers_done += stretch.layers
        batch.is_running = False
        if batch.layers_done == self.layers:
            self.line.remove(batch)
            self.finished[batch.number] = self.now_ns

    def _begin_source(self, loaded: int) -> None:
        if self.running[False] is not None or not self.has_source:
            return
        index = self.order.source_pull(self.line, loaded, self.layers)
        if index is not None:
            batch = self.line.pop(index)
            self._begin(False, batch, self.layers - batch.layers_done)

    def _begin_target(self, loaded: int) -> None:
        if self.running[True] is not None:
            return
        turn = self.order.target_turn(self.line, loaded, self.layers)
        if turn is not None:
            batch = self.line[turn.batch]
            assert 0 < turn.layers <= loaded - batch.layers_done, "runs what is there"
            batch.is_running = batch.had_turn = True
            self._begin(True, batch, turn.layers)

    def _begin(self, on_target: bool, batch: NumberedBatch, layers: int) -> None:
        stop_ns = self.now_ns + layers * self.layer_ns[batch.number]
        done = batch.layers_done
        stretch = Stretch(on_target, batch.number, done, layers, self.now_ns, stop_ns)
        self.running[on_target] = stretch
        self.stretches.append(stretch)
