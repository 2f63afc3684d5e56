"""Continuous batching: which positions of which requests one instance computes next.

An instance is three verbs: `batcher.next_run()` -> `executor.run(run, hidden)` ->
`batcher.commit(run, token_ids)`. The same Batcher runs in the workers and in the simulator. It
knows token ids, positions and block ids; it must not know time, tensors or sockets.

Policy: first come, first served. Running decodes go first (one token each), then prompts fill the
token budget in arrival order, in chunks (Sarathi-Serve, OSDI'24). A request is admitted when its
prompt and all the tokens that it may generate fit into free KV blocks, so a running request never
runs out of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from livescale.batching.blocks import BlockPool
from livescale.batching.run import Emission, Run, Segment, SequenceSpec
from livescale.types import FinishReason, LayerSpan, RequestId


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """Limits of one instance.

    `run_tokens_max` is the token budget of a Run; `sequences_max` bounds the running requests.
    """

    kv_blocks: int
    block_tokens: int
    run_tokens_max: int
    sequences_max: int

    def __post_init__(self) -> None:
        if self.run_tokens_max < 1 or self.sequences_max < 1:
            raise ValueError("run_tokens_max and sequences_max must be at least 1")
        if self.sequences_max > self.run_tokens_max:
            # Else some decodes would wait for others to end instead of running every time.
            raise ValueError(
                f"sequences_max {self.sequences_max} exceeds run_tokens_max {self.run_tokens_max}"
            )


@dataclass(slots=True)
class _Sequence:
    """A request on this instance. `computed` positions have their KV written."""

    spec: SequenceSpec
    block_table: tuple[int, ...] = ()
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def known_tokens(self) -> int:
        return len(self.spec.prompt_ids) + len(self.generated)

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is left to compute."""
        return self.computed == self.known_tokens - 1 and self.computed >= self.prefill_tokens

    @property
    def prefill_tokens(self) -> int:
        """Positions known when the request came: its prompt and an earlier attempt's tokens."""
        return len(self.spec.prompt_ids) + len(self.spec.generated_ids)

    @property
    def tokens_max(self) -> int:
        """Positions the request can ever need KV for: the last generated token needs none."""
        return len(self.spec.prompt_ids) + self.spec.sampling.output_tokens_max - 1

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        prompt = self.spec.prompt_ids
        split = len(prompt)
        head = tuple(prompt[start : min(stop, split)]) if start < split else ()
        return head + tuple(self.generated[max(start - split, 0) : max(stop - split, 0)])


class Batcher:
    """Decides the Runs of one instance that serves `span` (all layers of its model)."""

    def __init__(self, config: BatcherConfig, span: LayerSpan) -> None:
        self.config = config
        self.span = span
        self.pool = BlockPool(config.kv_blocks, config.block_tokens)
        #: accepted, no KV yet, in arrival order
        self._waiting: deque[_Sequence] = deque()
        #: admitted, in arrival order (dicts keep insertion order)
        self._running: dict[RequestId, _Sequence] = {}
        #: (request, attempt) pairs admitted since `take_started` was last called
        self._started: list[tuple[RequestId, int]] = []
        self._in_flight: Run | None = None
        self._runs = 0
        self.emitted_tokens = 0

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
        sequence = _Sequence(spec, generated=list(spec.generated_ids))
        if sequence.tokens_max > self.tokens_held_max():
            raise ValueError(
                f"request {spec.request} needs KV for {sequence.tokens_max} tokens,"
                f" the instance holds {self.tokens_held_max()}"
            )
        if self._find(spec.request) is not None:
            raise ValueError(f"request {spec.request} is on this instance already")
        self._waiting.append(sequence)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """Forget the request and free its KV at once.

        Returns False when it is not here. If a Run in flight still writes its blocks, they are
        freed when that Run is committed.
        """
        sequence = self._find(request)
        if sequence is None or sequence.spec.attempt != attempt or sequence.is_cancelled:
            return False
        if self._is_in_flight(request):
            sequence.is_cancelled = True
        elif request in self._running:
            self._retire(request)
        else:
            self._waiting.remove(sequence)
        return True

    # -- the three verbs --------------------------------------------------------------------

    def next_run(self) -> Run | None:
        """The next Run, or None when nothing can run. It must be committed before the next."""
        assert self._in_flight is None, f"{self!r}: {self._in_flight} is not committed"
        self._admit()
        segments = tuple(self._segments())
        if not segments:
            return None
        self._runs += 1
        self._in_flight = Run(self._runs, self.span, segments)
        return self._in_flight

    def commit(self, run: Run, token_ids: list[int]) -> list[Emission]:
        """Take the Run's result: one token per sampling segment, in segment order."""
        assert run is self._in_flight, f"{self!r}: run {run.id} is not in flight"
        sampling = [segment for segment in run.segments if segment.samples]
        assert len(sampling) == len(token_ids), f"{len(token_ids)} tokens for {len(sampling)}"
        self._in_flight = None
        sampled = iter(token_ids)
        emissions = []
        for segment in run.segments:
            sequence = self._running[segment.request]
            sequence.computed += segment.token_count
            token_id = next(sampled) if segment.samples else None
            if sequence.is_cancelled:
                self._retire(segment.request)
            elif token_id is not None:
                emissions.append(self._emit(sequence, token_id))
        return emissions

    # -- what can be asked ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens that are here and not yet computed."""
        sequences = (*self._waiting, *self._running.values())
        return sum(max(s.prefill_tokens - s.computed, 0) for s in sequences)

    def take_started(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) pairs admitted since the last call."""
        started, self._started = tuple(self._started), []
        return started

    def requests(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) of everything here, waiting or running."""
        sequences = (*self._running.values(), *self._waiting)
        return tuple((s.spec.request, s.spec.attempt) for s in sequences if not s.is_cancelled)

    def validate(self) -> None:
        """Check all collections against each other. Raises AssertionError."""
        self.pool.validate()
        assert len(self._running) <= self.config.sequences_max
        for request, sequence in self._running.items():
            assert self.pool.blocks_for(sequence.tokens_max) == len(sequence.block_table), request
            assert 0 <= sequence.computed < sequence.known_tokens, request
            assert len(sequence.generated) < sequence.spec.sampling.output_tokens_max, request
        for sequence in self._waiting:
            assert not sequence.block_table, sequence.spec.request
        held = sum(len(sequence.block_table) for sequence in self._running.values())
        assert held == self.pool.used, f"{held} blocks in tables, {self.pool.used} in use"

    def __repr__(self) -> str:
        return f"<Batcher {self.running} running, {self.waiting} waiting, {self.pool!r}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _find(self, request: RequestId) -> _Sequence | None:
        if request in self._running:
            return self._running[request]
        return next((s for s in self._waiting if s.spec.request == request), None)

    def _is_in_flight(self, request: RequestId) -> bool:
        run = self._in_flight
        return run is not None and any(s.request == request for s in run.segments)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.sequences_max:
            sequence = self._waiting[0]
            if not self.pool.can_hold(sequence.tokens_max):
                return  # first come, first served: nobody overtakes
            self._waiting.popleft()
            request = sequence.spec.request
            sequence.block_table = self.pool.reserve(request, sequence.tokens_max)
            self._running[request] = sequence
            self._started.append((request, sequence.spec.attempt))

    def _segments(self) -> Iterator[Segment]:
        budget = self.config.run_tokens_max
        sequences = list(self._running.values())
        # Decodes first: a long prompt must not stretch the time between two tokens of others.
        for sequence in [s for s in sequences if s.is_decoding]:
            if budget == 0:
                return
            budget -= 1
            yield self._segment(sequence, 1)
        for sequence in [s for s in sequences if not s.is_decoding]:
            if budget == 0:
                return
            count = min(budget, sequence.known_tokens - sequence.computed)
            budget -= count
            yield self._segment(sequence, count)

    def _segment(self, sequence: _Sequence, count: int) -> Segment:
        stop = sequence.computed + count
        return Segment(
            request=sequence.spec.request,
            attempt=sequence.spec.attempt,
            first_position=sequence.computed,
            token_ids=sequence.token_ids(sequence.computed, stop),
            block_table=sequence.block_table,
            samples=stop == sequence.known_tokens,
            sampling=sequence.spec.sampling,
            prompt_ids=sequence.spec.prompt_ids,
            generated_ids=sequence.generated,
        )

    def _emit(self, sequence: _Sequence, token_id: int) -> Emission:
        spec = sequence.spec
        index = len(sequence.generated)
        sequence.generated.append(token_id)
        self.emitted_tokens += 1
        reason = None
        if token_id in spec.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(sequence.generated) >= spec.sampling.output_tokens_max:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._retire(spec.request)
        return Emission(spec.request, spec.attempt, index, token_id, reason)

    def _retire(self, request: RequestId) -> None:
        del self._running[request]
        self.pool.release(request)
