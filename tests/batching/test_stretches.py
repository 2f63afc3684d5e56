"""Runs of several steps: what comes of them equals what as many Runs of one step give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams

ALL = LayerSpan(0, 4)


@dataclass(slots=True)
class Life:
    """A Batcher whose every step takes one tick, and what it gave out at which tick."""

    batcher: Batcher
    steps_max: int
    tokens: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    loads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    longest: int = 0

    def until(self, tick: int, stop: int) -> int:
        """Run until the tick at which something comes in, or nothing is left; the tick then."""
        while tick < stop:
            run = self.batcher.next(self.steps_max)
            if run is None:
                return stop
            if tick + run.steps > stop:
                run = self.batcher.shorten(run, stop - tick)
            self.longest = max(self.longest, run.steps)
            sampled = [
                range(s.context_tokens, s.context_tokens + run.steps)
                for s in run.segments
                if s.samples
            ]
            for e in self.batcher.done(run, sampled):
                told = self.tokens.setdefault(e.request, [])
                assert e.index == len(told)
                first = tick + run.steps - len(e.token_ids)
                told += [(first + n, token) for n, token in enumerate(e.token_ids)]
            tick += run.steps
            self.batcher.validate()
        return tick

    def load(self) -> tuple[int, ...]:
        b = self.batcher
        counts = (b.running, b.waiting, b.queued_prefill_tokens, b.pool.used, b.emitted_tokens)
        room = b.room
        return (*counts, room.preemptions, room.reused_tokens, room.prefix_lookup_tokens)


def arrivals(seed: int) -> Iterator[tuple[int, SequenceSpec]]:
    """(tick, request), in order. Some begin alike, and go on alike."""
    rng = random.Random(seed)
    tick = 0
    for number in range(rng.randint(1, 14)):
        tick += rng.choice([0, 0, 1, 7, 60])
        prompt = range(rng.randint(1, 30))
        content = f"c{rng.choice([number, number, rng.randint(0, 3)])}"
        sampling = SamplingParams(rng.randint(1, 50))
        yield tick, SequenceSpec(f"r{number}", 1, prompt, sampling, content=content)


def lived(seed: int, steps_max: int) -> Life:
    rng = random.Random(f"limits {seed}")
    config = BatcherConfig(
        kv_blocks=rng.choice([6, 12, 200]),
        block_tokens=rng.choice([1, 4, 16]),
        run_tokens_max=rng.choice([8, 64]),
        sequences_max=rng.choice([1, 3, 8]),
        growth_tokens=rng.choice([0, 8, 64]),
    )
    life = Life(Batcher(config, ALL), steps_max)
    tick = 0
    for at, spec in arrivals(seed):
        tick = life.until(tick, at) if at > tick else tick
        if spec.sampling.output_tokens_max + len(spec.prompt_ids) <= life.batcher.tokens_held_max():
            life.batcher.add(spec)
        life.loads[at] = life.load()
    life.until(tick, 1 << 30)
    life.loads[-1] = life.load()
    return life


@given(seed=st.integers(0, 1 << 32), steps_max=st.sampled_from([2, 5, 1000]))
def test_stretches_give_the_tokens_blocks_and_preemptions_of_single_steps(
    seed: int, steps_max: int
) -> None:
    one, many = lived(seed, 1), lived(seed, steps_max)
    assert many.tokens == one.tokens
    assert many.loads == one.loads


def test_most_of_a_long_answer_is_one_run() -> None:
    config = BatcherConfig(kv_blocks=64, block_tokens=16, run_tokens_max=64, sequences_max=4)
    batcher = Batcher(config, ALL)
    batcher.add(SequenceSpec("a", 1, range(10), SamplingParams(101), content="a"))
    prompt = batcher.next(1000)
    assert prompt is not None
    assert prompt.steps == 1
    batcher.done(prompt, [(10,)])
    answer = batcher.next(1000)
    assert answer is not None
    assert answer.steps == 100
    (emitted,) = batcher.done(answer, [range(11, 111)])
    assert (emitted.index, len(emitted.token_ids)) == (1, 100)
    assert not batcher.has_work


def test_a_cancelled_request_keeps_the_steps_that_were_over() -> None:
    config = BatcherConfig(kv_blocks=64, block_tokens=16, run_tokens_max=64, sequences_max=4)
    batcher = Batcher(config, ALL)
    batcher.add(SequenceSpec("a", 1, range(10), SamplingParams(50), content="a"))
    prompt = batcher.next(1000)
    assert prompt is not None
    batcher.done(prompt, [(10,)])
    run = batcher.next(1000)
    assert run is not None
    run = batcher.shorten(run, 7)
    assert batcher.cancel("a", 1)
    assert batcher.done(run, [range(11, 18)]) == []
    assert batcher.emitted_tokens == 1 + 6
    assert batcher.pool.used == 0


def test_a_stop_token_may_come_at_every_step() -> None:
    config = BatcherConfig(kv_blocks=64, block_tokens=16, run_tokens_max=64, sequences_max=4)
    batcher = Batcher(config, ALL)
    batcher.add(SequenceSpec("a", 1, range(10), SamplingParams(50, stop_token_ids=(3,))))
    for token in (10, 11):
        run = batcher.next(1000)
        assert run is not None
        assert run.steps == 1
        batcher.done(run, [(token,)])


def test_a_run_is_not_lengthened() -> None:
    config = BatcherConfig(kv_blocks=64, block_tokens=16, run_tokens_max=64, sequences_max=4)
    batcher = Batcher(config, ALL)
    batcher.add(SequenceSpec("a", 1, range(10), SamplingParams(50)))
    run = batcher.next(1000)
    assert run is not None
    with pytest.raises(AssertionError, match="2 of 1 steps"):
        batcher.shorten(run, 2)
