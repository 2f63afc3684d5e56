"""Continuous batching: which positions of which requests one instance computes next.

An instance is three verbs: `batcher.next()` -> `executor.run(run, hidden)` ->
`batcher.done(run, token_ids)`. The same Batcher runs in the workers and in the simulator. It
knows token ids, positions and block ids; it must not know time, tensors or sockets.

Requests are admitted first come, first served (`lines.py`, `kv_room.py`). In a Run requests
with one token left go first (decodes), then prompts share what the token budget leaves
(`choosing.py`).
Full blocks stay in the prefix index (`blocks.py`) until they are overwritten, so that requests that
begin alike, the next turns of a chat, and the preempted compute little twice.

Progress: the oldest request here is always running, never preempted, and part of every Run. So a
request ends at the latest after as many Runs as it and all those before it have positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from livescale.batching.runs.blocks import BlockPool
from livescale.batching.runs.choosing import TokenBudget, choose_segments
from livescale.batching.runs.held import HeldSequences
from livescale.batching.runs.kv_room import KvRoom
from livescale.batching.runs.lines import Lines
from livescale.batching.runs.run import EmittedTokens, Run, Segment, SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.batching.runs.stretches import advance, all_stay, steps_ahead
from livescale.messages.events import InstanceReported
from livescale.values.types import InstanceId, LayerSpan, RequestId


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """Limits of one instance.

    `run_tokens_max` is the token budget of a Run; `sequences_max` bounds the running requests;
    `oldest_prompt_percent` of the budget that decodes leave is for the oldest prompt, the rest
    for the shortest ones (100: strictly first come, first served). A request is admitted if each
    running one, itself included, could still generate `growth_tokens` (those that may end before
    need less; with more than any output nothing is ever preempted).
    """

    kv_blocks: int
    block_tokens: int
    run_tokens_max: int
    sequences_max: int
    oldest_prompt_percent: int = 50
    growth_tokens: int = 64

    def __post_init__(self) -> None:
        if self.run_tokens_max < 1 or self.sequences_max < 1:
            raise ValueError("run_tokens_max and sequences_max must be at least 1")
        if self.sequences_max > self.run_tokens_max:
            # Else some decodes would wait for others to end instead of running every time.
            raise ValueError(
                f"sequences_max {self.sequences_max} exceeds run_tokens_max {self.run_tokens_max}"
            )
        if not 1 <= self.oldest_prompt_percent <= 100:
            # Else the oldest prompt could wait forever for shorter ones.
            raise ValueError(f"oldest_prompt_percent {self.oldest_prompt_percent} is not in 1…100")
        if self.growth_tokens < 0:
            raise ValueError(f"growth_tokens {self.growth_tokens} is negative")


class Batcher:
    """Decides the Runs of one instance that serves `span` (all layers of its model).

    Up to `runs_max` Runs may be in flight, each of other requests: where a Run goes through several
    instances, one after the other, all of these have work (pipelining over requests). Each has its
    part of the running requests then: those that `pick` chooses of the free ones, if it is given.
    """

    def __init__(
        self,
        config: BatcherConfig,
        span: LayerSpan,
        runs_max: int = 1,
        pick: Callable[[Sequence[SequenceState]], Sequence[SequenceState]] | None = None,
    ) -> None:
        self._pick = pick
        self.config = config
        self.span = span
        self.runs_max = runs_max
        self.pool = BlockPool(config.kv_blocks, config.block_tokens)
        self.lines = Lines()
        #: parts of live batches, computed by other Runs than `next`'s
        self.held = HeldSequences(self.pool, self.lines)
        self.room = KvRoom(
            pool=self.pool,
            lines=self.lines,
            held=self.held,
            places=config.sequences_max,
            growth_tokens=config.growth_tokens,
        )
        #: cancelled while a Run in flight writes their blocks, by request and attempt
        self._leaving: dict[tuple[RequestId, int], SequenceState] = {}
        #: requests that found no place or no KV when the last ones were admitted
        self._left_out = 0
        self._in_flight: dict[int, Run] = {}
        #: (request, attempt) of their segments
        self._busy: dict[tuple[RequestId, int], None] = {}
        self._runs = 0
        self.emitted_tokens = 0

    # -- what comes in ----------------------------------------------------------------------

    def tokens_held_max(self) -> int:
        """Positions that the whole KV pool can hold: no single request may need more."""
        return self.config.kv_blocks * self.config.block_tokens

    def check(self, spec: SequenceSpec) -> None:
        """Raises ValueError when the request can never run here."""
        if not spec.prompt_ids:
            raise ValueError(f"request {spec.request} has an empty prompt")
        if spec.sampling.output_tokens_max <= len(spec.generated_ids):
            raise ValueError(f"request {spec.request} has no tokens left to generate")
        tokens_max = len(spec.prompt_ids) + spec.sampling.output_tokens_max - 1
        if tokens_max > self.tokens_held_max():
            raise ValueError(
                f"request {spec.request} needs KV for {tokens_max} tokens,"
                f" the instance holds {self.tokens_held_max()}"
            )

    def add(self, spec: SequenceSpec) -> None:
        """Accept a request; ValueError when it can never run here or is here already."""
        self.check(spec)
        sequence = SequenceState.of(spec, self.lines.arrivals + 1, self.config.block_tokens)
        if self.lines.find(spec.request) is not None:
            raise ValueError(f"request {spec.request} is on this instance already")
        self.lines.arrivals += 1
        self.lines.waiting[spec.request] = sequence

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """Forget the request and free its KV at once.

        Returns False when it is not here. If a Run in flight still writes its blocks, they are
        freed when that Run is committed.
        """
        sequence = self.lines.find(request)
        if sequence is None or sequence.spec.attempt != attempt:
            return False
        if (request, attempt) in self._busy:
            del self.lines.running[request]
            self._leaving[request, attempt] = sequence
        elif request in self.lines.running:
            self._retire(sequence)
        else:
            del self.lines.waiting[request]
        return True

    # -- the three verbs --------------------------------------------------------------------

    def next(
        self, steps_max: int = 1, *, admits: bool = True, mixed_tokens_max: int | None = None
    ) -> Run | None:
        """The next Run, or None when nothing more could run now.

        Without `admits` waiting requests go on waiting: a live batch that is older comes first.
        `mixed_tokens_max` is the token budget where prompts run beside requests that decode, if
        that is smaller.

        A caller that can carry out several steps at once (the simulator) gets up to `steps_max` if
        nothing that is here now can change the batch before the last of them. What comes in
        meanwhile may: then `shorten`.
        """
        assert len(self._in_flight) < self.runs_max, f"{self!r}: {self._in_flight} in flight"
        config = self.config
        self.room.grow(self._busy)
        if admits:
            self.room.admit()
            self._left_out = len(self.lines.waiting)
        running = self._free()
        budget = TokenBudget(config.run_tokens_max, mixed_tokens_max or config.run_tokens_max)
        segments = choose_segments(running, self.room, budget, config.oldest_prompt_percent)
        if not segments:
            return None
        steps = 1
        is_alone = self.runs_max == 1 and steps_max > 1
        if is_alone and all_stay(
            running, self.lines.first_waiting(), len(segments), config.sequences_max
        ):
            steps = steps_ahead(self.pool, list(running), steps_max)
        run = Run(self.next_run_id(), self.span, segments, steps)
        self._in_flight[run.id] = run
        self._busy.update(dict.fromkeys([(s.request, s.attempt) for s in segments]))
        return run

    def next_run_id(self) -> int:
        """Numbers the Runs of the instance, also those of live batches."""
        self._runs += 1
        return self._runs

    def shorten(self, run: Run, steps: int) -> Run:
        """The Run in flight ends after so many of its steps; commit the one that is returned."""
        assert run is self._in_flight.get(run.id), f"{self!r}: run {run.id} is not in flight"
        assert 1 <= steps <= run.steps, f"{steps} of {run.steps} steps"
        self._in_flight[run.id] = Run(run.id, run.span, run.segments, steps)
        return self._in_flight[run.id]

    def done(self, run: Run, token_ids: Sequence[Sequence[int]]) -> list[EmittedTokens]:
        """Take the Run's result: per sampling segment, in segment order, one token per step.

        Every layer has written the Run's positions, so the blocks that it filled are found by
        requests that begin alike.
        """
        assert run is self._in_flight.get(run.id), f"{self!r}: run {run.id} is not in flight"
        sampling = sum([segment.samples for segment in run.segments])
        assert sampling == len(token_ids), f"{len(token_ids)} tokens for {sampling}"
        assert {*map(len, token_ids)} <= {run.steps}, f"not {run.steps} steps"
        del self._in_flight[run.id]
        if run.steps > 1:
            advance(self.pool, [self._sequence_of(s) for s in run.segments], token_ids)
            self.emitted_tokens += (run.steps - 1) * len(token_ids)
        sampled = iter(token_ids)
        emitted = []
        for segment in run.segments:
            tokens = next(sampled) if segment.samples else ()
            sequence = self._sequence_of(segment)
            del self._busy[segment.request, segment.attempt]
            leaving = (segment.request, segment.attempt) if self._leaving else None
            if leaving is not None and self._leaving.pop(leaving, None) is not None:
                # Not for the prefix index: its part of the Run may have failed, unwritten.
                self.pool.release(sequence.block_table)
                continue
            sequence.write(self.pool, len(segment.token_ids))
            if tokens:
                emitted.append(sequence.emit(tokens))
                if not sequence.is_started:
                    self.lines.start(sequence)
                if emitted[-1].finish_reason is not None:
                    self._retire(sequence)
        self.emitted_tokens += len(emitted)
        return emitted

    # -- parts of live batches --------------------------------------------------------------

    def hold_waiting(self, tokens_max: int, order_max: int | None) -> list[SequenceState]:
        """The requests that wait longest are held from now on, with blocks for their known tokens:
        as many as have `tokens_max` tokens together (one at least), and as there is room for.
        With `order_max` only those that arrived up to then (see `Lines.arrivals`)."""
        taken: list[SequenceState] = []
        tokens = 0
        while (sequence := self.lines.first_waiting()) is not None:
            tokens += sequence.known_tokens
            if taken and tokens > tokens_max:
                break
            if not self.room.fits([(sequence.known_tokens, sequence.tokens_max)]):
                break
            if order_max is not None and sequence.order > order_max:
                break
            del self.lines.waiting[sequence.spec.request]
            self.held.add(sequence)
            taken.append(sequence)
        return taken

    def emit_held(self, sequence: SequenceState, token_ids: Sequence[int]) -> EmittedTokens:
        """All layers of its known tokens are computed, and this one is the next token.

        If it was its last one, it is over; else it waits for `HeldSequences.join`.
        """
        sequence.computed = sequence.known_tokens
        emitted = sequence.emit(token_ids)
        self.lines.start(sequence)
        self.emitted_tokens += 1
        if emitted.finish_reason is not None:
            self.held.drop(sequence)
        return emitted

    # -- what can be asked ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Something for `next` is here, or in flight."""
        return bool(self.lines.waiting or self.lines.running or self._leaving)

    @property
    def running(self) -> int:
        """Requests that were admitted and have blocks here, held ones included."""
        return len(self.lines.running) + len(self.held) + len(self._leaving)

    @property
    def waiting(self) -> int:
        return len(self.lines.waiting)

    @property
    def left_out(self) -> int:
        """Requests that waited on when the last ones were admitted: there was no place, or too
        little KV, for the first of them."""
        return min(self._left_out, len(self.lines.waiting))

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that are here and not yet computed, those of preempted requests again."""
        held = (s.prefill_tokens - s.computed for s in self.held if not s.is_elsewhere)
        return self.lines.queued_prefill_tokens + sum(max(count, 0) for count in held)

    def report(
        self, instance: InstanceId, handovers: int, prefill_tokens: int = 0, prefill_ns: int = 0
    ) -> InstanceReported:
        """The load now. What was admitted and started since the last report is in this one."""
        return InstanceReported(
            instance=instance,
            admitted=self.lines.take_admitted(),
            started=self.lines.take_started(),
            running=self.running,
            queued_prefill_tokens=self.queued_prefill_tokens,
            begun_prompt_tokens=self.lines.begun_prompt_tokens,
            kv_blocks_used=self.pool.used,
            kv_blocks=self.pool.blocks,
            emitted_tokens=self.emitted_tokens,
            left_out=self.left_out,
            kv_blocks_kept=self.room.growth_blocks,
            preemptions=self.room.preemptions,
            prefix_lookup_tokens=self.room.prefix_lookup_tokens,
            reused_tokens=self.room.reused_tokens,
            handovers=handovers,
            prefill_tokens=prefill_tokens,
            prefill_ns=prefill_ns,
        )

    def count_on(self, before: Batcher) -> None:
        """This one goes on in place of another: its sums, which only grow, are those of both."""
        self.emitted_tokens += before.emitted_tokens
        self.room.count_on(before.room)

    def requests(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) of everything here, waiting or running."""
        sequences = (*self.lines.running.values(), *self.held, *self.lines.waiting.values())
        return tuple((s.spec.request, s.spec.attempt) for s in sequences if not s.is_elsewhere)

    def attempts(self, request: RequestId) -> list[int]:
        """Attempts of this request that are here, those that have been taken over left out."""
        found = [s.spec.attempt for s in (self.lines.find(request),) if s is not None]
        held = (s for s in self.held if s.spec.request == request and not s.is_elsewhere)
        return found + [sequence.spec.attempt for sequence in held]

    def validate(self) -> None:
        """Check all collections against each other. Raises AssertionError."""
        users = (*self.lines.running.values(), *self._leaving.values())
        self.pool.validate([*(s.block_table for s in users), *self.held.tables()])
        self.lines.validate()
        self.room.validate()

    def __repr__(self) -> str:
        return f"<Batcher {self.running} running, {self.waiting} waiting, {self.pool!r}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _free(self) -> Collection[SequenceState]:
        """The running requests that may be in the next Run: those in no Run, with their blocks,
        and of these no more than make all Runs alike."""
        running = self.lines.running.values()
        if self.runs_max == 1:
            return running
        free = [s for s in running if (s.spec.request, s.spec.attempt) not in self._busy]
        ready = [sequence for sequence in free if not self.room.lacks(sequence)]
        if self._pick is not None:
            return self._pick(ready)
        return ready[: -(-len(running) // self.runs_max)]

    def _sequence_of(self, segment: Segment) -> SequenceState:
        """Whose segment of the Run in flight it is."""
        if self._leaving:
            leaving = self._leaving.get((segment.request, segment.attempt))
            if leaving is not None:
                return leaving
        return self.lines.running[segment.request]

    def _retire(self, sequence: SequenceState) -> None:
        del self.lines.running[sequence.spec.request]
        self.pool.release(sequence.block_table)
