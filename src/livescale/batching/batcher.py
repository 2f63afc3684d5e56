"""Continuous batching: which positions of which requests one instance computes next.

An instance is three verbs: `batcher.next_run()` -> `executor.run(run, hidden)` ->
`batcher.commit(run, token_ids)`. The same Batcher runs in the workers and in the simulator. It
knows token ids, positions and block ids; it must not know time, tensors or sockets.

Order: requests are admitted first come, first served. In a Run whoever has one token left goes
first (decodes), then prompts share what the token budget leaves, in chunks (Sarathi-Serve,
OSDI'24; `sharing.py`).

KV: a request is admitted when there are blocks for all its known tokens and for some growth of
everything that runs; further ones it takes as it generates. When none is left, the request that
arrived last is preempted: it goes back to the front of the waiting ones, keeps its tokens, and
computes them again as prompt. Full blocks stay in the prefix index until they are overwritten, so
that requests that begin alike, the next turns of a chat, and the preempted compute little twice.

Progress: the oldest request here is always running, never preempted, and part of every Run. So a
request ends at the latest after as many Runs as it and all those before it have positions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from livescale.batching.blocks import BlockPool
from livescale.batching.held import HeldSequences
from livescale.batching.room import Room
from livescale.batching.rules import check_lines, check_table
from livescale.batching.run import Emission, EmittedTokens, Run, Segment, SequenceSpec
from livescale.batching.sequence import SequenceState
from livescale.batching.sharing import share_tokens
from livescale.batching.stretches import block_changes, decodes_on, steps_ahead
from livescale.types import FinishReason, LayerSpan, RequestId


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
    """Decides the Runs of one instance that serves `span` (all layers of its model)."""

    def __init__(self, config: BatcherConfig, span: LayerSpan) -> None:
        self.config = config
        self.span = span
        self.pool = BlockPool(config.kv_blocks, config.block_tokens)
        # Both in arrival order, and whoever waits arrived after whoever runs.
        self._waiting: OrderedDict[RequestId, SequenceState] = OrderedDict()
        self._running: OrderedDict[RequestId, SequenceState] = OrderedDict()
        #: parts of live batches, computed by other Runs than `next_run`'s
        self.held = HeldSequences(self.pool)
        self._room = Room(
            pool=self.pool,
            running=self._running,
            held=self.held,
            places=config.sequences_max,
            growth_tokens=config.growth_tokens,
        )
        #: cancelled while a Run in flight writes their blocks, by request and attempt
        self._leaving: dict[tuple[RequestId, int], SequenceState] = {}
        #: (request, attempt) pairs first admitted since `take_started` was last called
        self._started: list[tuple[RequestId, int]] = []
        #: requests that found no place or no KV when the last ones were admitted
        self._left_out = 0
        self._in_flight: Run | None = None
        self._arrivals = 0
        self._runs = 0
        self.emitted_tokens = 0
        #: times that a running request lost its blocks to the others
        self.preemptions = 0
        #: known tokens of requests when they were admitted: all of them were looked up
        self.prefix_lookup_tokens = 0
        #: of these, the ones that were found in the prefix index and not computed
        self.reused_tokens = 0

    # -- what comes in ----------------------------------------------------------------------

    def tokens_held_max(self) -> int:
        """Positions that the whole KV pool can hold: no single request may need more."""
        return self.config.kv_blocks * self.config.block_tokens

    def add(self, spec: SequenceSpec) -> None:
        """Accept a request; ValueError when it can never run here or is here already."""
        if not spec.prompt_ids:
            raise ValueError(f"request {spec.request} has an empty prompt")
        if spec.sampling.output_tokens_max <= len(spec.generated_ids):
            raise ValueError(f"request {spec.request} has no tokens left to generate")
        sequence = SequenceState.of(spec, self._arrivals + 1, self.config.block_tokens)
        if sequence.tokens_max > self.tokens_held_max():
            raise ValueError(
                f"request {spec.request} needs KV for {sequence.tokens_max} tokens,"
                f" the instance holds {self.tokens_held_max()}"
            )
        if self._find(spec.request) is not None:
            raise ValueError(f"request {spec.request} is on this instance already")
        self._arrivals += 1
        self._waiting[spec.request] = sequence

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """Forget the request and free its KV at once.

        Returns False when it is not here. If a Run in flight still writes its blocks, they are
        freed when that Run is committed.
        """
        sequence = self._find(request)
        if sequence is None or sequence.spec.attempt != attempt:
            return False
        if self._is_in_flight(request, attempt):
            del self._running[request]
            self._leaving[request, attempt] = sequence
        elif request in self._running:
            self._retire(sequence)
        else:
            del self._waiting[request]
        return True

    # -- the three verbs --------------------------------------------------------------------

    def next_run(self, steps_max: int = 1, *, admits: bool = True) -> Run | None:
        """The next Run, or None when nothing is here. It must be committed before the next.

        Without `admits` whoever waits goes on waiting: a live batch that is older comes first.

        Whoever can carry out several steps at once (the simulator) gets up to `steps_max` if
        nothing that is here now can change the batch before the last of them. What comes in
        meanwhile may: then `shorten`.
        """
        assert self._in_flight is None, f"{self!r}: {self._in_flight} is not committed"
        self._grow()
        if admits:
            self._admit()
            self._left_out = len(self._waiting)
        segments = self._segments()
        if not segments:
            return None
        steps = 1
        if steps_max > 1 and self._all_stay(segments):
            steps = steps_ahead(self.pool, list(self._running.values()), steps_max)
        self._in_flight = Run(self.next_run_id(), self.span, segments, steps)
        return self._in_flight

    def next_run_id(self) -> int:
        """Numbers the Runs of the instance, also those of live batches."""
        self._runs += 1
        return self._runs

    def shorten(self, run: Run, steps: int) -> Run:
        """The Run in flight ends after so many of its steps; commit the one that is returned."""
        assert run is self._in_flight, f"{self!r}: run {run.id} is not in flight"
        assert 1 <= steps <= run.steps, f"{steps} of {run.steps} steps"
        self._in_flight = Run(run.id, run.span, run.segments, steps)
        return self._in_flight

    def commit(self, run: Run, token_ids: list[int]) -> list[Emission]:
        """Take the Run's result: one token per sampling segment, in segment order.

        Every layer has written the Run's positions, so the blocks that it filled are found by
        whoever begins alike.
        """
        emitted = self.commit_steps(run, [(token_id,) for token_id in token_ids])
        return [
            Emission(
                e.request, e.attempt, e.index, e.token_ids[0], e.finish_reason, e.cached_tokens
            )
            for e in emitted
        ]

    def commit_steps(self, run: Run, token_ids: Sequence[Sequence[int]]) -> list[EmittedTokens]:
        """As `commit`, for a Run of any number of steps: per sampling segment a token per step."""
        assert run is self._in_flight, f"{self!r}: run {run.id} is not in flight"
        sampling = sum(segment.samples for segment in run.segments)
        assert sampling == len(token_ids), f"{len(token_ids)} tokens for {sampling}"
        assert all(len(tokens) == run.steps for tokens in token_ids), f"not {run.steps} steps"
        self._in_flight = None
        if run.steps > 1:
            self._advance([self._sequence_of(s) for s in run.segments], token_ids)
        sampled = iter(token_ids)
        emitted = []
        for segment in run.segments:
            tokens = next(sampled) if segment.samples else ()
            sequence = self._sequence_of(segment)
            self._write(sequence, len(segment.token_ids))
            if self._leaving.pop((segment.request, segment.attempt), None) is not None:
                self.pool.release(sequence.block_table)
            elif tokens:
                emitted.append(self._emit(sequence, tokens))
                if emitted[-1].finish_reason is not None:
                    self._retire(sequence)
        return emitted

    # -- parts of live batches --------------------------------------------------------------

    def hold_waiting(self, tokens_max: int, order_max: int | None) -> list[SequenceState]:
        """The requests that wait longest are held from now on, with blocks for their known tokens:
        as many as have `tokens_max` tokens together (one at least), and as there is room for.
        With `order_max` only those that arrived up to then (see `arrivals`)."""
        taken: list[SequenceState] = []
        tokens = 0
        while self._waiting:
            sequence = next(iter(self._waiting.values()))
            tokens += sequence.known_tokens
            if taken and tokens > tokens_max:
                break
            if not self.has_room([(sequence.known_tokens, sequence.tokens_max)]):
                break
            if order_max is not None and sequence.order > order_max:
                break
            del self._waiting[sequence.spec.request]
            self.held.add(sequence)
            self._start(sequence)
            taken.append(sequence)
        return taken

    def has_room(self, needs: Sequence[tuple[int, int]]) -> bool:
        """Further requests could be held besides all that grows here. Of each: known tokens, and
        the most that it can ever need KV for."""
        return self._room.fits(needs)

    def fits_alone(self, needs: Sequence[tuple[int, int]]) -> bool:
        """There would be room for these requests if nothing else were here, and for each of them
        alone until it ends."""
        return self._room.fits_alone(needs)

    def hold(self, spec: SequenceSpec, block_table: tuple[int, ...]) -> SequenceState:
        """A request that is computed elsewhere so far; its blocks were reserved."""
        self._arrivals += 1
        sequence = SequenceState.of(spec, self._arrivals, self.config.block_tokens)
        sequence.block_table = block_table
        self.held.add(sequence)
        self._start(sequence)
        return sequence

    def decoding(self) -> list[SequenceState]:
        """Running requests whose next token needs one position only, the earliest first."""
        return [sequence for sequence in self._running.values() if sequence.tokens_left == 1]

    def hold_decoding(self, sequence: SequenceState) -> None:
        """A running request is held from now on: it may go elsewhere. Between two Runs."""
        del self._running[sequence.spec.request]
        self.held.add(sequence)

    def resume(self, sequence: SequenceState) -> None:
        """A held request that was running here goes on."""
        self.held.remove(sequence)
        self._run_in_order(sequence)

    def emit_held(self, sequence: SequenceState, token_id: int) -> Emission:
        """All layers of its known tokens are computed, and this is the next token.

        If it was its last one, it is over; else it waits for `join`.
        """
        sequence.computed = sequence.known_tokens
        e = self._emit(sequence, (token_id,))
        if e.finish_reason is not None:
            self.held.drop(sequence)
        return Emission(
            e.request, e.attempt, e.index, e.token_ids[0], e.finish_reason, e.cached_tokens
        )

    def join(self, sequence: SequenceState) -> None:
        """Every layer of what is computed is written here: from now on it runs as others do."""
        self.held.remove(sequence)
        computed, sequence.computed = sequence.computed, 0
        self._write(sequence, computed)
        self._run_in_order(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """It waits again, before those that came after it, and is computed anew."""
        self.held.drop(sequence)
        sequence.computed = 0
        sequence.prefill_tokens = sequence.known_tokens
        self._wait_in_order(sequence)

    # -- what can be asked ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Something for `next_run` is here, or in flight."""
        return bool(self._waiting or self._running or self._leaving)

    @property
    def run_in_flight(self) -> Run | None:
        """What `next_run` gave and `commit` has not seen."""
        return self._in_flight

    @property
    def running(self) -> int:
        """Requests that were started and have blocks here, held ones included."""
        return len(self._running) + len(self.held) + len(self._leaving)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def left_out(self) -> int:
        """Requests that waited on when the last ones were admitted: there was no place, or too
        little KV, for the first of them."""
        return min(self._left_out, len(self._waiting))

    @property
    def growth_blocks(self) -> int:
        """KV blocks, of those that are free, that are kept for what is here to grow: that many at
        most."""
        return min(self._room.growing_max(), self.pool.free)

    @property
    def running_here(self) -> int:
        """Requests that `next_run` computes: decodes, and prompts that it has begun."""
        return len(self._running)

    @property
    def arrivals(self) -> int:
        """Requests that ever arrived: the order of the last one."""
        return self._arrivals

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that are here and not yet computed, those of preempted requests again."""
        held = (s.prefill_tokens - s.computed for s in self.held if not s.is_elsewhere)
        return self.queued_own_tokens + sum(max(count, 0) for count in held)

    @property
    def queued_own_tokens(self) -> int:
        """Of these, the ones that `next_run` will compute."""
        sequences = (*self._waiting.values(), *self._running.values())
        return sum(max(s.prefill_tokens - s.computed, 0) for s in sequences)

    def waits_since(self, order_max: int | None) -> bool:
        """Somebody waits who arrived up to then (None: whenever)."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and (order_max is None or first.order <= order_max)

    def take_started(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) pairs first admitted since the last call."""
        started, self._started = tuple(self._started), []
        return started

    def requests(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) of everything here, waiting or running."""
        sequences = (*self._running.values(), *self.held, *self._waiting.values())
        return tuple((s.spec.request, s.spec.attempt) for s in sequences if not s.is_elsewhere)

    def attempts(self, request: RequestId) -> list[int]:
        """Attempts of this request that are here, those that have been taken over left out."""
        found = [s.spec.attempt for s in (self._find(request),) if s is not None]
        held = (s for s in self.held if s.spec.request == request and not s.is_elsewhere)
        return found + [sequence.spec.attempt for sequence in held]

    def validate(self) -> None:
        """Check all collections against each other. Raises AssertionError."""
        users = (*self._running.values(), *self._leaving.values())
        self.pool.validate([*(s.block_table for s in users), *self.held.tables()])
        assert self._room.taken_places <= self.config.sequences_max
        assert 0 <= self.reused_tokens <= self.prefix_lookup_tokens
        check_lines(self._running, self._waiting)
        for sequence in self._running.values():
            check_table(sequence, self.pool)

    def __repr__(self) -> str:
        return f"<Batcher {self.running} running, {self.waiting} waiting, {self.pool!r}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _find(self, request: RequestId) -> SequenceState | None:
        return self._running.get(request) or self._waiting.get(request)

    def _is_in_flight(self, request: RequestId, attempt: int) -> bool:
        segments = self._in_flight.segments if self._in_flight is not None else ()
        return any((s.request, s.attempt) == (request, attempt) for s in segments)

    def _sequence_of(self, segment: Segment) -> SequenceState:
        """Whose segment of the Run in flight it is."""
        leaving = self._leaving.get((segment.request, segment.attempt))
        return leaving or self._running[segment.request]

    def _retire(self, sequence: SequenceState) -> None:
        del self._running[sequence.spec.request]
        self.pool.release(sequence.block_table)

    def _grow(self) -> None:
        """Every running request has blocks for all its known tokens: some wait again for it.

        Each lacks one block at most, and older ones take theirs first. The oldest gets it always,
        because it fits into the pool alone.
        """
        block_tokens = self.config.block_tokens
        lacking = [
            sequence
            for sequence in self._running.values()
            if len(sequence.block_table) * block_tokens < sequence.known_tokens
        ]
        for sequence in lacking:
            # A request that was preempted for an older one is met here without its blocks.
            while sequence.block_table and (
                len(sequence.block_table) * block_tokens < sequence.known_tokens
            ):
                if self.pool.free:
                    sequence.block_table += (self.pool.take(),)
                else:
                    self._preempt_latest()

    def _preempt_latest(self) -> None:
        _, sequence = self._running.popitem()
        self.pool.release(sequence.block_table)
        sequence.block_table = ()
        sequence.computed = 0
        sequence.prefill_tokens = sequence.known_tokens
        self._wait_in_order(sequence)
        self.preemptions += 1

    def _run_in_order(self, sequence: SequenceState) -> None:
        """It runs, behind those that arrived before it: a held one may have overtaken others."""
        later = []
        for request, other in reversed(self._running.items()):
            if other.order < sequence.order:
                break
            later.append(request)
        self._running[sequence.spec.request] = sequence
        for request in reversed(later):
            self._running.move_to_end(request)

    def _wait_in_order(self, sequence: SequenceState) -> None:
        """It waits again, before those that arrived after it."""
        earlier = []
        for request, other in self._waiting.items():
            if other.order > sequence.order:
                break
            earlier.append(request)
        self._waiting[sequence.spec.request] = sequence
        for request in reversed((*earlier, sequence.spec.request)):
            self._waiting.move_to_end(request, last=False)

    def _admit(self) -> None:
        """Whoever waits runs, in order of arrival, while there is room for it and for growth."""
        if not self._waiting:
            return
        pool = self.pool
        # No request grows by more: mostly there is room even so, and nobody needs to count.
        growing = self._room.growing_max()
        is_counted = False
        while self._waiting and self._room.has_place:
            request, sequence = next(iter(self._waiting.items()))
            found = pool.match(sequence.reusable_keys())
            wanted = self._room.growth(sequence) - len(found) + pool.free_among(found)
            if wanted + growing > pool.free and not is_counted:
                growing, is_counted = self._room.growing(), True
            if wanted + growing > pool.free:
                return  # first come, first served: nobody overtakes
            del self._waiting[request]
            self._run_in_order(sequence)
            pool.hold(found)
            blank = pool.blocks_for(sequence.known_tokens) - len(found)
            sequence.block_table = (*found, *(pool.take() for _ in range(blank)))
            sequence.computed = len(found) * self.config.block_tokens
            growing += self._room.growth(sequence)
            self.prefix_lookup_tokens += sequence.known_tokens
            self.reused_tokens += sequence.computed
            if not sequence.is_started:  # later it finds what it has written itself
                sequence.cached_tokens = sequence.computed
            self._start(sequence)

    def _start(self, sequence: SequenceState) -> None:
        if not sequence.is_started:
            sequence.is_started = True
            self._started.append((sequence.spec.request, sequence.spec.attempt))

    def _all_stay(self, segments: Sequence[Segment]) -> bool:
        """Whoever runs decodes, and goes on to; whoever waits goes on waiting.

        Each further token only takes room from those who wait. What they find in the prefix index
        may grow, though, if a running one writes what the first of them begins with.
        """
        running = self._running
        if len(running) != len(segments) or not all(map(decodes_on, running.values())):
            return False
        if not self._waiting or len(running) >= self.config.sequences_max:
            return True
        content = next(iter(self._waiting.values())).spec.content
        others = (s.spec.content for s in running.values())
        return content != "" and all(other not in ("", content) for other in others)

    def _segments(self) -> tuple[Segment, ...]:
        # One token each, in every Run: a long prompt must not stretch the time between two tokens
        # of others. The budget has room for them, and for one token of every prompt besides.
        segments = []
        prompts = []
        for sequence in self._running.values():
            left = sequence.tokens_left
            if left > 1:
                self._reuse(sequence)
                left = sequence.tokens_left
            if left > 1:
                prompts.append(sequence)
            else:
                segments.append(self._segment(sequence, 1, samples=True))
        if not prompts:
            return tuple(segments)
        counts = share_tokens(
            [sequence.tokens_left for sequence in prompts],
            [sequence.next_key() for sequence in prompts],
            self.config.run_tokens_max - len(segments),
            self.config.oldest_prompt_percent,
        )
        shares = zip(prompts, counts, strict=True)
        segments += [
            self._segment(sequence, count, samples=count == sequence.tokens_left)
            for sequence, count in shares
            if count > 0
        ]
        return tuple(segments)

    def _reuse(self, sequence: SequenceState) -> None:
        """Blocks that others have written since the prompt was admitted are not computed again."""
        first = sequence.computed // self.config.block_tokens
        found = self.pool.match(sequence.reusable_keys(first))
        if found:
            table, stop = sequence.block_table, first + len(found)
            self.pool.hold(found)
            self.pool.release(table[first:stop])
            sequence.block_table = (*table[:first], *found, *table[stop:])
            reused_tokens = stop * self.config.block_tokens - sequence.computed
            self.reused_tokens += reused_tokens
            sequence.cached_tokens += reused_tokens
            sequence.computed = stop * self.config.block_tokens

    def _segment(self, sequence: SequenceState, count: int, *, samples: bool) -> Segment:
        spec, first = sequence.spec, sequence.computed
        return Segment(
            request=spec.request,
            attempt=spec.attempt,
            first_position=first,
            token_ids=sequence.token_ids(first, first + count),
            block_table=sequence.block_table,
            samples=samples,
            sampling=spec.sampling,
            prompt_ids=spec.prompt_ids,
            generated_ids=sequence.generated,
        )

    def _write(self, sequence: SequenceState, count: int) -> None:
        """So many further positions have their KV in every layer: blocks that they filled are
        found by whoever begins alike."""
        first = sequence.computed // self.config.block_tokens
        sequence.computed += count
        for number in range(first, sequence.computed // self.config.block_tokens):
            self.pool.publish(sequence.block_table[number], sequence.key(number))

    def _advance(
        self, running: Sequence[SequenceState], token_ids: Sequence[Sequence[int]]
    ) -> None:
        """All steps of a Run but the last are over: their tokens were the next steps' input.

        Blocks are published and taken in the order of single steps, so that the same ones leave
        the prefix index.
        """
        size = self.config.block_tokens
        changes: list[tuple[int, bool, int, int]] = []
        for place, (sequence, tokens) in enumerate(zip(running, token_ids, strict=True)):
            steps = len(tokens) - 1
            changes += block_changes(sequence, steps, size, place)
            sequence.generated.extend(tokens[:-1])
            sequence.computed += steps
            self.emitted_tokens += steps
        for _, is_taken, place, number in sorted(changes):
            sequence = running[place]
            if is_taken:
                sequence.block_table += (self.pool.take(),)
            else:
                self.pool.publish(sequence.block_table[number], sequence.key(number))

    def _emit(self, sequence: SequenceState, token_ids: Sequence[int]) -> EmittedTokens:
        """The last step's token is new; those before it are known already."""
        spec = sequence.spec
        token_id = token_ids[-1]
        index = len(sequence.generated) + 1 - len(token_ids)
        sequence.generated.append(token_id)
        self.emitted_tokens += 1
        reason = None
        if token_id in spec.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(sequence.generated) >= spec.sampling.output_tokens_max:
            reason = FinishReason.LENGTH
        cached_tokens = min(sequence.cached_tokens, len(spec.prompt_ids)) if index == 0 else 0
        return EmittedTokens(spec.request, spec.attempt, index, token_ids, reason, cached_tokens)
