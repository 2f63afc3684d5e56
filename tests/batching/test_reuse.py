"""Prefix reuse and preemption by example: what is computed once, and what again."""

from __future__ import annotations

from collections.abc import Sequence

from kv_double import KVDouble

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams


class Instance:
    """A Batcher and an executor that checks what it reads."""

    def __init__(self, kv_blocks: int = 64, budget: int = 32, growth: int = 0) -> None:
        config = BatcherConfig(kv_blocks, 4, budget, 4, growth_tokens=growth)
        self.batcher = Batcher(config, LayerSpan(0, 3))
        self.executor = KVDouble.of(self.batcher)
        #: positions computed, and tokens emitted
        self.computed: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        #: as first tokens tell
        self.cached: dict[str, int] = {}

    def add(self, request: str, prompt: Sequence[int], output: int = 1, salt: str = "") -> None:
        spec = SequenceSpec(request, 1, prompt, SamplingParams(output), cache_salt=salt)
        self.batcher.add(spec)
        self.executor.expect(spec)
        self.computed[request] = 0
        self.tokens[request] = []

    def step(self) -> Run:
        run = self.batcher.next()
        assert run is not None
        self.batcher.validate()
        emissions = self.batcher.done(run, [[token_id] for token_id in self.executor.run(run)])
        self.batcher.validate()
        for segment in run.segments:
            self.computed[segment.request] += segment.token_count
        for e in emissions:
            assert e.index == len(self.tokens[e.request])
            self.tokens[e.request].extend(e.token_ids)
            self.cached[e.request] = self.cached.get(e.request, 0) + e.cached_tokens
        return run

    def finish(self) -> dict[str, list[int]]:
        while self.batcher.has_work:
            self.step()
        return self.tokens


def test_an_equal_prompt_is_not_computed_again_but_for_its_end() -> None:
    instance = Instance()
    for request, tokens in (("a", 12), ("b", 12), ("c", 13)):
        instance.add(request, range(tokens))
        instance.finish()
    assert instance.computed == {"a": 12, "b": 4, "c": 1}
    assert instance.cached == {"a": 0, "b": 8, "c": 12}
    assert instance.batcher.room.reused_tokens == 8 + 12
    assert instance.batcher.room.prefix_lookup_tokens == 12 + 12 + 13
    assert instance.batcher.pool.cached == 3


def test_of_an_embedding_nothing_is_reused_or_looked_up() -> None:
    instance = Instance()
    for request in ("a", "b"):
        spec = SequenceSpec(request, 1, range(12), SamplingParams(1, embeds=True))
        instance.batcher.add(spec)
        run = instance.batcher.next()
        assert run is not None
        assert run.segments[0].token_count == 12
        instance.batcher.done(run, [(0,)])
    assert instance.batcher.room.reused_tokens == 0
    assert instance.batcher.room.prefix_lookup_tokens == 0


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    instance = Instance()
    instance.add("turn 1", range(10), output=8)
    answer = instance.finish()["turn 1"]
    instance.add("turn 2", [*range(10), *answer, 1, 2, 3])
    instance.finish()
    # 17 positions of the first turn are in the cache, and 16 of them in full blocks.
    assert instance.computed["turn 2"] == 21 - 16


def test_salts_keep_requests_apart() -> None:
    instance = Instance()
    instance.add("a", range(12), salt="a")
    instance.add("b", range(12), salt="b")
    instance.finish()
    instance.add("c", range(12), salt="a")
    instance.finish()
    assert instance.computed == {"a": 12, "b": 12, "c": 4}


def test_requests_that_come_at_once_share_what_the_first_computes() -> None:
    instance = Instance(budget=64)
    for number in range(4):
        instance.add(f"r{number}", [*range(20), number])
    run = instance.step()
    assert [segment.request for segment in run.segments] == ["r0"]
    run = instance.step()
    assert [segment.token_count for segment in run.segments] == [1, 1, 1]
    assert instance.batcher.pool.used == 0
    assert instance.batcher.room.reused_tokens == 60


def test_what_is_shared_takes_no_further_blocks() -> None:
    instance = Instance(kv_blocks=8)
    instance.add("first", range(20), output=4)
    instance.step()
    instance.add("second", range(20), output=4)
    instance.step()
    assert instance.batcher.running == 2
    assert instance.batcher.pool.used == 4 + 2 + 2 - 1


def test_the_latest_is_preempted_and_goes_on_where_it_was() -> None:
    instance = Instance(kv_blocks=6)
    instance.add("old", range(8), output=12)
    instance.add("new", range(100, 108), output=12)
    batcher = instance.batcher
    while batcher.room.preemptions == 0:
        instance.step()
    assert batcher.requests() == (("old", 1), ("new", 1))
    assert (batcher.running, batcher.waiting) == (1, 1)
    assert batcher.lines.take_admitted() == (("old", 1), ("new", 1))
    alone = Instance()
    for request, prompt in (("old", range(8)), ("new", range(100, 108))):
        alone.add(request, prompt, output=12)
    assert instance.finish() == alone.finish()
    assert batcher.room.preemptions == 1
    assert batcher.lines.take_admitted() == (), "it is admitted once"
    assert batcher.lines.take_started() == (("old", 1), ("new", 1)), "and starts once"
    assert 0 < instance.computed["new"] - 19 < 19, "its beginning was still there"


def test_room_for_growth_is_left_where_it_can_be_used() -> None:
    """20 of 24 positions are known: 4 or more tokens of growth keep the next one out."""
    for growth, outputs, running in ((0, 9, 2), (64, 9, 1), (64, 1, 2)):
        instance = Instance(kv_blocks=6, growth=growth)
        instance.add("a", range(12), output=outputs)
        instance.add("b", range(100, 108), output=outputs)
        instance.batcher.next()
        assert instance.batcher.running == running
        instance.batcher.validate()


def test_a_preempted_prompt_counts_as_queued_work_again() -> None:
    instance = Instance(kv_blocks=4, budget=8)
    instance.add("old", range(7), output=9)
    instance.add("new", range(100, 107), output=9)
    assert instance.batcher.queued_prefill_tokens == 14
    while instance.batcher.room.preemptions == 0:
        instance.step()
    assert instance.batcher.queued_prefill_tokens == 7 + len(instance.tokens["new"]) > 7
    instance.finish()
    assert instance.batcher.queued_prefill_tokens == 0
