"""Batcher in every order of calls: what must hold after each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from livescale.batching.batcher import Batcher, BatcherConfig
from livescale.batching.run import Run, SequenceSpec
from livescale.types import FinishReason, LayerSpan, SamplingParams

_STOP_ID = 0
_BLOCK_TOKENS = 4


@dataclass(slots=True)
class Expected:
    """What the test knows of a request that is here."""

    spec: SequenceSpec
    order: int
    tokens: list[int]
    computed: int = 0
    is_admitted: bool = False
    is_cancelled: bool = False
    block_table: tuple[int, ...] = field(default=())

    @property
    def known_ids(self) -> list[int]:
        return [*self.spec.prompt_ids, *self.tokens]

    @property
    def blocks(self) -> int:
        """KV blocks it holds: for its prompt and all tokens but the last, from admission on."""
        tokens = len(self.spec.prompt_ids) + self.spec.sampling.output_tokens_max - 1
        return -(-tokens // _BLOCK_TOKENS) if self.is_admitted else 0

    @property
    def is_decoding(self) -> bool:
        return len(self.tokens) > len(self.spec.generated_ids)


class BatcherMachine(RuleBasedStateMachine):
    """Adds, runs, commits and cancels, and keeps its own simple account of it."""

    @initialize(
        kv_blocks=st.integers(1, 12),
        sequences_max=st.integers(1, 4),
        spare_tokens=st.integers(0, 8),
    )
    def begin(self, kv_blocks: int, sequences_max: int, spare_tokens: int) -> None:
        config = BatcherConfig(
            kv_blocks, _BLOCK_TOKENS, sequences_max + spare_tokens, sequences_max
        )
        self.batcher = Batcher(config, LayerSpan(0, 3))
        self.here: dict[str, Expected] = {}
        self.added = 0
        self.admitted: list[int] = []
        self.emitted = 0
        self.run: Run | None = None

    # -- calls ----------------------------------------------------------------------------------

    @rule(
        prompt_tokens=st.integers(1, 20),
        generated=st.lists(st.integers(1, 9), max_size=4),
        more=st.integers(1, 6),
        stops=st.booleans(),
        attempt=st.integers(1, 3),
    )
    def add(
        self, prompt_tokens: int, generated: list[int], more: int, stops: bool, attempt: int
    ) -> None:
        self.added += 1
        request = f"r{self.added}"
        sampling = SamplingParams(len(generated) + more, (_STOP_ID,) if stops else ())
        spec = SequenceSpec(request, attempt, range(prompt_tokens), sampling, tuple(generated))
        needed = prompt_tokens + sampling.output_tokens_max - 1
        try:
            self.batcher.add(spec)
        except ValueError:
            assert needed > self.batcher.tokens_held_max()
        else:
            assert needed <= self.batcher.tokens_held_max()
            self.here[request] = Expected(spec, self.added, list(generated))

    @precondition(lambda self: self.run is None)
    @rule()
    def next_run(self) -> None:
        self.run = self.batcher.next_run()
        self._take_started()
        if self.run is None:
            assert not self.here, "whatever is here can run"
        else:
            self._check_run(self.run)

    @precondition(lambda self: self.run is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.run is not None
        run, self.run = self.run, None
        sampling = [s for s in run.segments if s.samples]
        tokens = data.draw(
            st.lists(st.integers(0, 9), min_size=len(sampling), max_size=len(sampling))
        )
        token_of = {s.request: t for s, t in zip(sampling, tokens, strict=True)}
        emissions = {e.request: e for e in self.batcher.commit(run, tokens)}
        for segment in run.segments:
            expected = self.here[segment.request]
            expected.computed += segment.token_count
            emission = emissions.pop(segment.request, None)
            if expected.is_cancelled:
                assert emission is None, "nobody hears of a cancelled request"
                del self.here[segment.request]
            elif segment.samples:
                assert emission is not None
                token = token_of[segment.request]
                assert emission.index == len(expected.tokens), "indices are contiguous"
                assert (emission.token_id, emission.attempt) == (token, expected.spec.attempt)
                expected.tokens.append(token)
                self.emitted += 1
                reason = self._reason(expected, token)
                assert emission.finish_reason == reason
                if reason is not None:
                    del self.here[segment.request]
        assert not emissions

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
            assert self.batcher.pool.used == used
        else:
            assert self.batcher.pool.used == used - expected.blocks
            del self.here[request]

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def accounts_agree(self) -> None:
        batcher = self.batcher
        batcher.validate()
        here = [e for e in self.here.values() if not e.is_cancelled]
        pairs = sorted((e.spec.request, e.spec.attempt) for e in here)
        assert sorted(batcher.requests()) == pairs
        assert batcher.running + batcher.waiting == len(self.here)
        assert batcher.has_work == bool(self.here)
        assert batcher.emitted_tokens == self.emitted
        queued = sum(
            max(len(e.spec.prompt_ids) + len(e.spec.generated_ids) - e.computed, 0)
            for e in self.here.values()
        )
        assert batcher.queued_prefill_tokens == queued
        tables = [block for e in self.here.values() for block in e.block_table]
        assert len(set(tables)) == len(tables), "no block belongs to two requests"
        assert batcher.pool.used == sum(e.blocks for e in self.here.values())

    def teardown(self) -> None:
        """Without further requests everything here ends, and nothing is left."""
        if not hasattr(self, "batcher"):
            return
        rounds = 0
        while self.here:
            if self.run is None:
                self.run = self.batcher.next_run()
                self._take_started()
                assert self.run is not None, "whatever is here can run"
            run, self.run = self.run, None
            for e in self.batcher.commit(run, [1] * sum(s.samples for s in run.segments)):
                if e.finish_reason is not None:
                    del self.here[e.request]
            for request in [r for r, e in self.here.items() if e.is_cancelled]:
                del self.here[request]
            self.batcher.validate()
            rounds += 1
            assert rounds < 10_000
        assert self.batcher.pool.used == 0
        assert not self.batcher.has_work

    # -- helpers --------------------------------------------------------------------------------

    def _take_started(self) -> None:
        for request, attempt in self.batcher.take_started():
            expected = self.here[request]
            assert attempt == expected.spec.attempt
            assert not expected.is_admitted
            expected.is_admitted = True
            self.admitted.append(expected.order)
        assert self.admitted == sorted(self.admitted), "first come, first served"

    def _check_run(self, run: Run) -> None:
        limit = self.batcher.config.run_tokens_max
        assert 0 < run.token_count <= limit
        assert run.span == self.batcher.span
        requests = [segment.request for segment in run.segments]
        assert len(set(requests)) == len(requests)
        decoding = [r for r, e in self.here.items() if e.is_admitted and e.is_decoding]
        assert set(decoding) <= set(requests), "every running decode gets its token"
        left_out = [r for r, e in self.here.items() if e.is_admitted and r not in requests]
        assert not left_out or run.token_count == limit, "the budget is used"
        for segment in run.segments:
            expected = self.here[segment.request]
            assert expected.is_admitted
            assert segment.first_position == expected.computed, "positions come once, in order"
            stop = segment.first_position + segment.token_count
            known = expected.known_ids
            assert list(segment.token_ids) == known[segment.first_position : stop]
            assert segment.samples == (stop == len(known))
            assert stop <= len(segment.block_table) * _BLOCK_TOKENS
            assert expected.block_table in ((), segment.block_table), "a table never changes"
            expected.block_table = segment.block_table

    @staticmethod
    def _reason(expected: Expected, token: int) -> FinishReason | None:
        sampling = expected.spec.sampling
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if len(expected.tokens) == sampling.output_tokens_max:
            return FinishReason.LENGTH
        return None


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
