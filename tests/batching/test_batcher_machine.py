"""Batcher in every order of calls: what must hold after each of them.

The machine keeps its own simple account of every request; KVDouble keeps one of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from kv_double import KVDouble

from effort import examples
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import EmittedTokens, Run, SequenceSpec
from livescale.values.types import FinishReason, LayerSpan, SamplingParams

_STOP_ID = 0
_BLOCK_TOKENS = 4


@dataclass(slots=True)
class Expected:
    """What the test knows of a request that is here."""

    spec: SequenceSpec
    order: int
    tokens: list[int]
    #: positions computed by the last committed Run that it was part of
    computed: int = 0
    is_admitted: bool = False
    is_cancelled: bool = False

    @property
    def prefill_left(self) -> int:
        prefill = len(self.spec.prompt_ids) + len(self.spec.generated_ids)
        return max(prefill - self.computed, 0)


class BatcherMachine(RuleBasedStateMachine):
    """Adds, runs, commits and cancels, and keeps its own simple account of it."""

    @initialize(
        kv_blocks=st.integers(1, 12),
        sequences_max=st.integers(1, 4),
        spare_tokens=st.integers(0, 8),
        oldest_prompt_percent=st.integers(1, 100),
        growth_tokens=st.integers(0, 8),
        is_shared=st.booleans(),
    )
    def begin(
        self,
        kv_blocks: int,
        sequences_max: int,
        spare_tokens: int,
        oldest_prompt_percent: int,
        growth_tokens: int,
        is_shared: bool,
    ) -> None:
        config = BatcherConfig(
            kv_blocks,
            _BLOCK_TOKENS,
            sequences_max + spare_tokens,
            sequences_max,
            oldest_prompt_percent,
            growth_tokens,
        )
        self.batcher = Batcher(config, LayerSpan(0, 3))
        self.executor = KVDouble.of(self.batcher)
        self.is_shared = is_shared
        self.here: dict[str, Expected] = {}
        self.added = 0
        self.admitted: list[int] = []
        self.emitted = 0
        self.run: Run | None = None

    # -- calls ----------------------------------------------------------------------------------

    @rule(
        prompt_tokens=st.integers(1, 20),
        end=st.integers(0, 2),
        generated=st.lists(st.integers(1, 2), max_size=4),
        more=st.integers(1, 6),
        stops=st.booleans(),
        embeds=st.booleans(),
        attempt=st.integers(1, 3),
    )
    def add(
        self,
        prompt_tokens: int,
        end: int,
        generated: list[int],
        more: int,
        stops: bool,
        embeds: bool,
        attempt: int,
    ) -> None:
        self.added += 1
        request = f"r{self.added}"
        sampling = SamplingParams(len(generated) + more, (_STOP_ID,) if stops else ())
        if embeds:
            generated, sampling = [], SamplingParams(1, embeds=True)
        prompt = [*range(prompt_tokens - 1), end]
        salt = "" if self.is_shared else request
        spec = SequenceSpec(request, attempt, prompt, sampling, tuple(generated), salt)
        needed = prompt_tokens + sampling.output_tokens_max - 1
        try:
            self.batcher.add(spec)
        except ValueError:
            assert needed > self.batcher.tokens_held_max()
        else:
            assert needed <= self.batcher.tokens_held_max()
            self.executor.expect(spec)
            self.here[request] = Expected(spec, self.added, list(generated))

    @precondition(lambda self: self.run is None)
    @rule()
    def next_run(self) -> None:
        self.run = self.batcher.next()
        self._take_admitted()
        if self.run is None:
            assert not self.here, "whatever is here can run"
        else:
            self._check_run(self.run)

    @precondition(lambda self: self.run is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.run is not None
        sampling = len(self.executor.run(self.run))
        self._commit(data.draw(st.lists(st.integers(0, 9), min_size=sampling, max_size=sampling)))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.here)))
        expected = self.here[request]
        used = self.batcher.pool.used
        assert not self.batcher.cancel(request, expected.spec.attempt + 1)
        done = self.batcher.cancel(request, expected.spec.attempt)
        assert done is not expected.is_cancelled
        is_in_flight = self.run is not None and any(s.request == request for s in self.run.segments)
        if is_in_flight:
            expected.is_cancelled = True
            assert self.batcher.pool.used == used, "the Run still writes its blocks"
        else:
            assert self.batcher.pool.used <= used
            del self.here[request]

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def accounts_agree(self) -> None:
        batcher = self.batcher
        batcher.validate()
        here = [e for e in self.here.values() if not e.is_cancelled]
        pairs = [(e.spec.request, e.spec.attempt) for e in here]
        assert list(batcher.requests()) == pairs, "in order of arrival, whoever was preempted"
        assert batcher.running + batcher.waiting == len(self.here)
        assert batcher.has_work == bool(self.here)
        assert batcher.emitted_tokens == self.emitted
        if batcher.room.preemptions == batcher.room.reused_tokens == 0:
            queued = sum(e.prefill_left for e in here)
            assert batcher.queued_prefill_tokens == queued
        if not self.is_shared and batcher.room.preemptions == 0:
            assert batcher.room.reused_tokens == 0, "there is nothing that begins alike"

    def teardown(self) -> None:
        """Without further requests everything here ends, and nothing is left."""
        if not hasattr(self, "batcher"):
            return
        rounds = 0
        positions = sum(
            len(e.spec.prompt_ids) + e.spec.sampling.output_tokens_max for e in self.here.values()
        )
        while self.here:
            if self.run is None:
                self.next_run()
            assert self.run is not None
            self._commit(self.executor.run(self.run))
            self.accounts_agree()
            rounds += 1
            assert rounds <= positions, "every Run brings the oldest request nearer to its end"
        assert self.batcher.pool.used == 0
        assert not self.batcher.has_work

    # -- helpers --------------------------------------------------------------------------------

    def _take_admitted(self) -> None:
        for request, attempt in self.batcher.lines.take_admitted():
            expected = self.here[request]
            assert attempt == expected.spec.attempt
            assert not expected.is_admitted, "a request is admitted once"
            expected.is_admitted = True
            self.admitted.append(expected.order)
        assert self.admitted == sorted(self.admitted), "first come, first served"

    def _check_run(self, run: Run) -> None:
        limit = self.batcher.config.run_tokens_max
        assert 0 < run.token_count <= limit
        assert run.span == self.batcher.span
        requests = [segment.request for segment in run.segments]
        assert len(set(requests)) == len(requests)
        assert next(iter(self.here)) in requests, "the oldest moves on"
        if len(requests) < self.batcher.running and not self.is_shared:
            assert run.token_count == limit, "the budget is used"
        for segment in run.segments:
            expected = self.here[segment.request]
            assert expected.is_admitted
            if self.batcher.room.preemptions == self.batcher.room.reused_tokens == 0:
                assert segment.first_position == expected.computed, "positions come once, in order"
            if segment.sampling.embeds:
                assert segment.first_position in (0, expected.computed), "no row is left out"
            assert len(segment.block_table) <= self.batcher.pool.used

    def _commit(self, token_ids: list[int]) -> None:
        assert self.run is not None
        run, self.run = self.run, None
        sampling = [s.request for s in run.segments if s.samples]
        token_of = dict(zip(sampling, token_ids, strict=True))
        emissions = {
            e.request: e for e in self.batcher.done(run, [[token_id] for token_id in token_ids])
        }
        started = [(e.request, e.attempt) for e in emissions.values() if self._is_first(e)]
        assert [*self.batcher.lines.take_started()] == started, "the first token starts a request"
        for segment in run.segments:
            expected = self.here[segment.request]
            expected.computed = segment.context_tokens
            emission = emissions.pop(segment.request, None)
            if expected.is_cancelled:
                assert emission is None, "nobody hears of a cancelled request"
                del self.here[segment.request]
            elif segment.samples:
                assert emission is not None
                self._take(expected, emission, token_of[segment.request])
        assert not emissions

    def _is_first(self, emission: EmittedTokens) -> bool:
        expected = self.here[emission.request]
        return len(expected.tokens) == len(expected.spec.generated_ids)

    def _take(self, expected: Expected, emission: EmittedTokens, token_id: int) -> None:
        assert emission.index == len(expected.tokens), "indices are contiguous"
        assert ([*emission.token_ids], emission.attempt) == ([token_id], expected.spec.attempt)
        expected.tokens.append(token_id)
        self.emitted += 1
        sampling = expected.spec.sampling
        reason = None
        if token_id in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(expected.tokens) == sampling.output_tokens_max:
            reason = FinishReason.LENGTH
        assert emission.finish_reason == reason
        if reason is not None:
            del self.here[expected.spec.request]


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)
