"""Two machines that share prefill batches in a live order, in virtual time.

The target has the first layers of a model and gets the others at given times, the source has all.
`play` shows what an order could do at best: without a network, whatever one machine finishes the
other knows at once. `play_pair` is the same with the production protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.batching.live_batch import LiveLimits
from livescale.batching.live_order import LiveOrder, Progress, Turn
from livescale.sim.pair.pair_world import PairLoad, PairRun, PairWorld

_LIMITS = LiveLimits()


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

    @property
    def first_help_ns(self) -> int | None:
        """When the target began its first layer; None if it never did."""
        return next((s.start_ns for s in self.stretches if s.on_target), None)

    def utilization(self, on_target: bool) -> float:
        """Share of the time until the last batch ended that a machine was busy."""
        return self._busy_ns(on_target, 0, self.last_ns) / self.last_ns

    def rate(self, from_ns: int, to_ns: int) -> float:
        """Layers that were run in this time, by their time: in instances, so that the source alone
        makes 1 and both make 2."""
        busy = sum(self._busy_ns(side, from_ns, to_ns) for side in (True, False))
        return busy / (to_ns - from_ns)

    def _busy_ns(self, on_target: bool, from_ns: int, to_ns: int) -> int:
        return sum(
            max(0, min(s.stop_ns, to_ns) - max(s.start_ns, from_ns))
            for s in self.stretches
            if s.on_target == on_target
        )


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
    return _Machines(_Ordered(order, has_source), layers, layer_ns, loaded_ns).play()


def replay(
    split: Sequence[int], layers: int, layer_ns: Sequence[int], loaded_ns: Sequence[int]
) -> LivePlay:
    """As `play`, but the target runs `split[i]` layers of batch i (an optimum's, say), the earliest
    batch first; the source takes the batches in order, each when the target's part is done."""
    if len(split) != len(layer_ns) or not all(0 <= count <= layers for count in split):
        raise ValueError(f"{list(split)}: 0 to {layers} layers of each of {len(layer_ns)} batches")
    return _Machines(_Replayed(tuple(split)), layers, layer_ns, loaded_ns).play()


def play_pair(
    order: str,
    layers: int,
    batch_layer_ns: Sequence[int],
    arrived_ns: Sequence[int],
    message_ns: int,
    bytes_per_s: int | None,
    row_bytes: int,
    kv_layer_bytes: int,
    tokens: Sequence[int],
    *,
    decodes: int = 0,
    decode_ns: int = 0,
    output_tokens: int = 1,
    head_ns: int = 0,
    limits: LiveLimits = _LIMITS,
) -> PairRun:
    """The same with the production protocol: two LiveBatchers and their messages.

    See `PairLoad`. Orders that are not live have a queue before both instances, from which each
    takes its next batch when it is free; in the others all batches are sent to the target.
    """
    load = PairLoad(
        order=order,
        layers=layers,
        batch_layer_ns=tuple(batch_layer_ns),
        arrived_ns=tuple(arrived_ns),
        message_ns=message_ns,
        bytes_per_s=bytes_per_s,
        row_bytes=row_bytes,
        kv_layer_bytes=kv_layer_bytes,
        tokens=tuple(tokens),
        decodes=decodes,
        decode_ns=decode_ns,
        output_tokens=output_tokens,
        head_ns=head_ns,
        limits=limits,
    )
    return PairWorld(load).play()


def loaded_every(layer_ns: int, layers: int) -> tuple[int, ...]:
    """Load times of layers that arrive at a steady pace, where the first is there at 0 (BlitzScale
    Figure 15)."""
    return tuple(layer_ns * m for m in range(layers))


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(slots=True)
class _Batch:
    number: int
    progress: Progress


class _Choice(Protocol):
    """Who does what. Lines are what neither machine has finished nor the source taken."""

    def target(self, line: Sequence[_Batch], loaded: int, layers: int) -> Turn | None: ...

    def source(self, line: Sequence[_Batch], loaded: int, layers: int) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Ordered:
    order: LiveOrder
    has_source: bool

    def target(self, line: Sequence[_Batch], loaded: int, layers: int) -> Turn | None:
        return self.order.target_turn([batch.progress for batch in line], loaded, layers)

    def source(self, line: Sequence[_Batch], loaded: int, layers: int) -> int | None:
        if not self.has_source:
            return None
        return self.order.source_pull([batch.progress for batch in line], loaded, layers)


@dataclass(frozen=True, slots=True)
class _Replayed:
    split: tuple[int, ...]

    def target(self, line: Sequence[_Batch], loaded: int, layers: int) -> Turn | None:
        for index, batch in enumerate(line):
            if batch.progress.layers_done < min(loaded, self.split[batch.number]):
                return Turn(index, 1)
        return None

    def source(self, line: Sequence[_Batch], loaded: int, layers: int) -> int | None:
        # What the target finishes never comes to the source: it is not waited for.
        for index, batch in enumerate(line):
            if self.split[batch.number] < layers:
                is_ready = batch.progress.layers_done == self.split[batch.number]
                return index if is_ready else None
        return None


class _Machines:
    """Both machines, and the time."""

    def __init__(
        self, choice: _Choice, layers: int, layer_ns: Sequence[int], loaded_ns: Sequence[int]
    ) -> None:
        if list(loaded_ns) != sorted(loaded_ns) or len(loaded_ns) > layers:
            raise ValueError(f"{list(loaded_ns)}: rising times of at most {layers} layers")
        self._choice = choice
        self._layers = layers
        self._layer_ns = layer_ns
        self._loaded_ns = loaded_ns
        self._line = [_Batch(number, Progress()) for number in range(len(layer_ns))]
        self._finished: dict[int, int] = {}
        self._stretches: list[Stretch] = []
        #: by machine (on_target), what it is in
        self._in: dict[bool, Stretch | None] = {False: None, True: None}
        self._now_ns = 0

    def play(self) -> LivePlay:
        while len(self._finished) < len(self._layer_ns):
            for on_target in (False, True):
                self._end(on_target)
            loaded = sum(at_ns <= self._now_ns for at_ns in self._loaded_ns)
            self._begin_source(loaded)
            self._begin_target(loaded)
            coming = [at_ns for at_ns in self._loaded_ns if at_ns > self._now_ns]
            coming += [stretch.stop_ns for stretch in self._in.values() if stretch is not None]
            if coming:
                self._now_ns = min(coming)
            elif len(self._finished) < len(self._layer_ns):
                waiting = [batch.number for batch in self._line]
                raise ValueError(f"batches {waiting} wait for layers that never come")
        ends = tuple(self._finished[number] for number in range(len(self._layer_ns)))
        return LivePlay(ends, tuple(self._stretches))

    def _end(self, on_target: bool) -> None:
        stretch = self._in[on_target]
        if stretch is None or stretch.stop_ns > self._now_ns:
            return
        self._in[on_target] = None
        if not on_target:
            self._finished[stretch.batch] = self._now_ns
            return
        batch = next(b for b in self._line if b.number == stretch.batch)
        batch.progress.layers_done += stretch.layers
        batch.progress.is_running = False
        if batch.progress.layers_done == self._layers:
            self._line.remove(batch)
            self._finished[batch.number] = self._now_ns

    def _begin_source(self, loaded: int) -> None:
        if self._in[False] is not None:
            return
        index = self._choice.source(self._line, loaded, self._layers)
        if index is not None:
            batch = self._line.pop(index)
            self._begin(False, batch, self._layers - batch.progress.layers_done)

    def _begin_target(self, loaded: int) -> None:
        if self._in[True] is not None:
            return
        turn = self._choice.target(self._line, loaded, self._layers)
        if turn is not None:
            batch = self._line[turn.batch]
            assert 0 < turn.layers <= loaded - batch.progress.layers_done, "runs what is there"
            batch.progress.is_running = batch.progress.had_turn = True
            self._begin(True, batch, turn.layers)

    def _begin(self, on_target: bool, batch: _Batch, layers: int) -> None:
        stop_ns = self._now_ns + layers * self._layer_ns[batch.number]
        done = batch.progress.layers_done
        stretch = Stretch(on_target, batch.number, done, layers, self._now_ns, stop_ns)
        self._in[on_target] = stretch
        self._stretches.append(stretch)
