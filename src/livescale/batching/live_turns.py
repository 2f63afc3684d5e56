"""Whose turn it is where there are live batches: decodes, the own line, or what was taken over."""

from __future__ import annotations

from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveBatch, LiveLimits
from livescale.batching.live_giver import LiveGiver
from livescale.batching.live_order import ZIGZAG, LiveOrder
from livescale.batching.live_pace import LivePace
from livescale.batching.live_taker import LiveTaker
from livescale.batching.run import Run

_CALM_SPANS = 3
"""Spans that a Run of a pulled batch may take while no pull is due: KV comes in after it."""
_TOLERANCE = 16
"""Runs may take so much longer than they are to: what was measured is no more exact."""


class LiveTurns:
    """Chooses the next Run. `in_flight` is the live batch that it computes, if it is one."""

    def __init__(
        self,
        batcher: Batcher,
        limits: LiveLimits,
        pace: LivePace,
        giver: LiveGiver,
        taker: LiveTaker,
        order: LiveOrder | None,
    ) -> None:
        self._batcher = batcher
        self._limits = limits
        self._pace = pace
        self._giver = giver
        self._taker = taker
        self._order = order
        self._decoder_layers = batcher.span.stop - 2
        self.in_flight: LiveBatch | None = None

    def next_run(self, loaded: int, steps_max: int) -> Run | None:
        """The next Run with `loaded` decoder layers."""
        is_full = loaded == self._decoder_layers
        if not is_full:
            return self._line_run(loaded)
        if not (self._giver.line or self._taker.runnable()):
            return self._batcher.next_run(steps_max)
        if self._is_decodes_turn():
            run = self._batcher.next_run(admits=False)
            if run is not None:
                return run
        return self._line_run(loaded) or self._taken_run() or self._batcher.next_run(admits=False)

    def _is_decodes_turn(self) -> bool:
        """Decodes go on between the layers of a batch: another one would keep them too long."""
        if not self._batcher.lines.running or not self._pace.live_ns:
            return False
        batch = next(iter((*self._giver.line, *self._taker.runnable())))
        return self._pace.layer_ns(batch) > self._pace.left_ns()

    def _line_run(self, loaded: int) -> Run | None:
        """The target's turn."""
        if self._order is None:
            return None
        line = [batch.progress(False) for batch in self._giver.line]
        # Without anybody who pulls it finishes what it has, whatever it has done of it.
        order = ZIGZAG if self._giver.is_parted else self._order
        turn = order.target_turn(line, loaded, self._decoder_layers)
        if turn is not None:
            batch = self._giver.line[turn.batch]
            batch.had_turn = True
            return self._start(batch, turn.layers)
        # The rest of a batch that the order leaves to the source, and that it does not want.
        staying = next((batch for batch in self._giver.line if batch.stays), None)
        if staying is None or loaded < self._decoder_layers:
            return None
        return self._start(staying, self._decoder_layers - staying.layers_done)

    def _taken_run(self) -> Run | None:
        """Some layers of the batch that was taken over first."""
        batch = next(iter(self._taker.runnable()), None)
        if batch is None:
            return None
        count = self._decoder_layers - batch.layers_done
        # Also without decodes: between two Runs the next batch is asked for, and KV comes in.
        span_ns = self._limits.span_ns
        room_ns = min(max(self._taker.calm_ns(), span_ns), _CALM_SPANS * span_ns)
        if self._batcher.lines.running:
            room_ns = min(room_ns, self._pace.left_ns())
        room_ns += room_ns // _TOLERANCE
        layer_ns = self._pace.layer_ns(batch)
        fitting = room_ns // layer_ns if layer_ns else 1
        return self._start(batch, max(1, min(count, fitting)))

    def _start(self, batch: LiveBatch, count: int) -> Run:
        span = batch.span(count, self._decoder_layers)
        self.in_flight = batch
        samples = span.stop == self._batcher.span.stop
        return batch.run(self._batcher.next_run_id(), span, samples=samples)
