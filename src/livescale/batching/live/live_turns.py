"""Whose turn it is where there are live batches: decodes, the own line, or what was taken over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from livescale.batching.contract.live_order import ZIGZAG, LiveOrder
from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.live.live_batches import LiveBatches
from livescale.batching.live.live_giver import LiveGiver
from livescale.batching.live.live_pace import LivePace
from livescale.batching.live.live_taker import LiveTaker
from livescale.batching.runs.run import EmittedTokens, Run

_CALM_SPANS = 3
"""Spans that a Run of a pulled batch may take while no pull is due: KV comes in after it."""
_TOLERANCE = 16
"""Runs may take so much longer than they are to: what was measured is no more exact."""
_RUNS_MAX = 2
_LATE_PART = 4
"""Decodes wait for live work of so many-th of a Run full of prompt tokens, and for such a Run."""


class LiveTurns:
    """Chooses the next Run. `in_flight` are those that were chosen and not committed, the earliest
    first, each with its live batch, if it is of one.

    An executor carries Runs out in their order. So a Run of a live batch may be chosen while one is
    in flight, also of the same batch: of results it needs none. Of Runs with requests that decode
    there is one at a time.
    """

    def __init__(
        self,
        limits: LiveLimits,
        pace: LivePace,
        batches: LiveBatches,
        giver: LiveGiver,
        taker: LiveTaker,
        order: LiveOrder | None,
    ) -> None:
        self._batcher = batches.batcher
        self._limits = limits
        self._pace = pace
        self._batches = batches
        self._giver = giver
        self._taker = taker
        self._order = order
        self._decoder_layers = batches.batcher.span.stop - 2
        self.in_flight: deque[tuple[Run, LiveBatch | None]] = deque()
        #: something is to be done when no Run is in flight
        self.is_awaited = False

    def next(self, loaded: int, steps_max: int) -> Run | None:
        """The next Run with `loaded` decoder layers. While one is in flight: None, unless all that
        is here was taken over."""
        is_full = loaded == self._decoder_layers
        if self.in_flight and not (self._may_run_ahead() and is_full):
            return None
        if not is_full:
            return self._line_run(loaded)
        if not (self._batches.line or self._taker.runnable()):
            if self._is_first_decodes_turn():
                return self._plain_run(admits=False)
            return self._plain_run(1 if self.in_flight else steps_max, admits=True)
        if self._is_decodes_turn() or self._is_begun_prompts_turn():
            run = self._plain_run(admits=False)
            if run is not None:
                return run
        # What is left in line is for a source that may be busy for long: others run meanwhile.
        return self._line_run(loaded) or self._taken_run() or self._plain_run(admits=True)

    def done(self, run: Run, token_ids: Sequence[Sequence[int]]) -> list[EmittedTokens]:
        """The first Run in flight is over: per sampling segment a token per step."""
        chosen, batch = self.in_flight.popleft()
        assert chosen.id == run.id, f"{self._batcher!r}: run {run.id} is not the first in flight"
        if batch is None:
            return self._batcher.done(run, token_ids)
        assert run.steps == 1
        assert run.span.start == batch.next_layer, f"{run.span} of {batch.key}"
        batch.next_layer = run.span.stop
        batch.chosen_layers -= run.span.stop - run.span.start
        if run.span.stop < self._batcher.span.stop:
            assert not token_ids, f"{len(token_ids)} tokens without a head"
            self._batches.end_if_over(batch)
            return []
        emitted = []
        for sequence, tokens in zip([*batch.sequences], token_ids, strict=True):
            if sequence.spec.request in batch.cancelled:
                self._batcher.held.drop(sequence)
                batch.sequences.remove(sequence)
                continue
            emitted.append(self._batcher.emit_held(sequence, tokens))
            if emitted[-1].finish_reason is not None:
                batch.sequences.remove(sequence)
        batch.cancelled = {}
        self._batches.join_if_complete(batch)
        return emitted

    def in_flight_ns(self) -> int:
        """What a Run in flight that is of no live batch takes with prompts (0: not known)."""
        return sum(
            self._pace.run_ns(run)
            for run, batch in self.in_flight
            if batch is None and run.prefill_tokens
        )

    def _may_run_ahead(self) -> bool:
        """Layers of batches that are given away are run as late as can be; and where requests
        decode, what a Run in flight takes must be known."""
        if not self._batches.taken or self.is_awaited or len(self.in_flight) == _RUNS_MAX:
            return False
        is_giving = (
            self._batches.line
            or self._batches.early
            or self._batches.given
            or not self._giver.is_parted
        )
        is_known = self._pace.token_layer_ps or not self._batcher.lines.running
        return not is_giving and bool(is_known)

    def _live_ns(self) -> int:
        """Live work since decodes had their turn, with what is in flight."""
        live_ns = self._pace.live_ns
        for run, batch in self.in_flight:
            live_ns = live_ns + self._pace.run_ns(run) if batch is not None else 0
        return live_ns

    def _is_decodes_turn(self) -> bool:
        """Decodes go on between the layers of a batch: another one would keep them too long."""
        live_ns = self._live_ns() if self._batcher.lines.running else 0
        if not live_ns:
            return False
        batch = next(iter((*self._batches.line, *self._taker.runnable())))
        return self._pace.layer_ns(batch) > self._pace.left_ns(live_ns)

    def _is_first_decodes_turn(self) -> bool:
        """Prompts wait to be admitted, and decodes have waited for live work already: with the
        prompts' Run on top that would be too long."""
        lines = self._batcher.lines
        if not (self._limits.decodes_first and lines.running and lines.waiting):
            return False
        return self._live_ns() > self._pace.full_run_ns // _LATE_PART

    def _is_begun_prompts_turn(self) -> bool:
        """A prompt that is computed in part came before the batches that were taken over. Between
        their layers decodes would wait for its Run, too."""
        is_own = not self._batches.line and self._batcher.lines.has_begun_prompts
        return self._limits.decodes_first and is_own and not self._live_ns()

    def _plain_run(self, steps_max: int = 1, *, admits: bool) -> Run | None:
        """A Run of no live batch."""
        if any(batch is None for _, batch in self.in_flight):
            return None
        mixed = self._pace.mixed_tokens_max()
        run = self._batcher.next(steps_max, admits=admits, mixed_tokens_max=mixed)
        if run is not None:
            self.in_flight.append((run, None))
        return run

    def _line_run(self, loaded: int) -> Run | None:
        """The target's turn."""
        if self._order is None:
            return None
        line = [batch.progress() for batch in self._batches.line]
        # Without anybody who pulls it finishes what it has, whatever it has done of it.
        order = ZIGZAG if self._giver.is_parted else self._order
        turn = order.target_turn(line, loaded, self._decoder_layers)
        if turn is not None:
            batch = self._batches.line[turn.batch]
            batch.had_turn = True
            return self._start(batch, turn.layers)
        # The rest of a batch that the order leaves to the source, and that it does not want.
        staying = next((batch for batch in self._batches.line if batch.stays), None)
        if staying is None or loaded < self._decoder_layers:
            return None
        return self._start(staying, self._decoder_layers - staying.layers_done)

    def _taken_run(self) -> Run | None:
        """Some layers of the batch that was taken over first."""
        batch = next(iter(self._taker.runnable()), None)
        if batch is None:
            return None
        count = self._decoder_layers - max(batch.chosen_layer - 1, 0)
        # Also without decodes: when a Run ends the next batch is asked for, and KV comes in.
        span_ns = self._limits.span_ns
        chosen_ns = sum(self._pace.run_ns(run) for run, of in self.in_flight if of is not None)
        calm_ns = self._taker.calm_ns() - chosen_ns
        room_ns = min(calm_ns, _CALM_SPANS * span_ns) if calm_ns > 0 else span_ns
        if self._batcher.lines.running:
            room_ns = min(room_ns, self._pace.left_ns(self._live_ns()))
        room_ns += room_ns // _TOLERANCE
        layer_ns = self._pace.layer_ns(batch)
        fitting = room_ns // layer_ns if layer_ns else 1
        return self._start(batch, max(1, min(count, fitting)))

    def _start(self, batch: LiveBatch, count: int) -> Run:
        span = batch.span(count, self._decoder_layers)
        samples = span.stop == self._batcher.span.stop
        run = batch.choose(self._batcher.next_run_id(), span, samples=samples)
        self.in_flight.append((run, batch))
        return run
