"""Thousands of random sequences of Batcher calls, each drawn from its seed: every rule holds.

`LIVESCALE_BATCHER_SEQUENCES` is how many are run (100,000 take some minutes).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from kv_double import KVDouble, reference

from effort import examples
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import Run, SequenceSpec
from livescale.values.types import LayerSpan, SamplingParams

SEQUENCES = examples(int(os.environ.get("LIVESCALE_BATCHER_SEQUENCES", "2500")))


@dataclass(slots=True)
class Told:
    """A request that is here, as its gateway knows it."""

    spec: SequenceSpec
    tokens: list[int]
    #: the Run by whose commit it must have ended
    ends_by: int
    is_cancelled: bool = False

    @property
    def tokens_max(self) -> int:
        return len(self.spec.prompt_ids) + self.spec.sampling.output_tokens_max - 1


@dataclass(slots=True)
class Sequence:
    """One sequence of calls: what is here, in order of arrival, and what was seen."""

    rng: random.Random
    batcher: Batcher
    executor: KVDouble
    here: dict[str, Told] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    run: Run | None = None
    #: who got a token of the last Run and wants more
    decoding: list[str] = field(default_factory=list)
    runs: int = 0
    added: int = 0

    def add(self) -> None:
        """A prompt of few different tokens and beginnings, or an answered one with more to it."""
        self.added += 1
        rng, batcher = self.rng, self.batcher
        prompt = [rng.choice([0, 0, 1])] * rng.randint(0, 7) + [rng.randint(0, 1)]
        if self.here and rng.random() < 0.3:
            other = rng.choice(list(self.here.values()))
            prompt = [*other.spec.prompt_ids, *other.tokens, *prompt[: rng.randint(0, 4)]]
        generated = reference_start(prompt, rng.choice([0, 0, 0, 2]))
        sampling = SamplingParams(len(generated) + rng.randint(1, 12), rng.choice([(), (), (3,)]))
        salt = rng.choice(["", "", "", "x"])
        spec = SequenceSpec(
            f"r{self.added}", rng.randint(1, 2), prompt, sampling, generated, cache_salt=salt
        )
        told = Told(spec, list(generated), 0)
        try:
            batcher.add(spec)
        except ValueError:
            assert told.tokens_max > batcher.tokens_held_max()
            return
        assert told.tokens_max <= batcher.tokens_held_max()
        self.executor.expect(spec)
        self.here[spec.request] = told
        ahead = sum(other.tokens_max for other in self.here.values())
        told.ends_by = self.runs + (self.run is not None) + ahead

    def next_run(self) -> None:
        preemptions = self.batcher.room.preemptions
        self.run = self.batcher.next()
        self.seen["started"] += len(self.batcher.lines.take_admitted())
        assert self.seen["started"] <= self.added, "a request is admitted once"
        if self.run is None:
            assert not self.here, "whatever is here can run"
            return
        order = list(self.here)
        places = [order.index(segment.request) for segment in self.run.segments]
        assert min(places) == 0, "the oldest request is part of every Run"
        assert len(set(places)) == len(places) <= self.batcher.config.sequences_max
        assert self.run.token_count <= self.batcher.config.run_tokens_max
        preempted = self.batcher.room.preemptions - preemptions
        self.seen["preemptions"] += preempted
        left_out = [order.index(r) for r in self.decoding if r in self.here]
        left_out = [place for place in left_out if place not in places]
        assert len(left_out) <= preempted, "decodes are part of every Run"
        assert not left_out or max(places) < min(left_out), "who arrived last is preempted"

    def commit(self) -> None:
        assert self.run is not None
        run, self.run = self.run, None
        emissions = self.batcher.done(run, [[token_id] for token_id in self.executor.run(run)])
        self.runs += 1
        self.decoding = [e.request for e in emissions if e.finish_reason is None]
        for e in emissions:
            told = self.here[e.request]
            assert not told.is_cancelled
            assert (e.index, e.attempt) == (len(told.tokens), told.spec.attempt)
            told.tokens.extend(e.token_ids)
            if e.finish_reason is not None:
                assert told.tokens == reference(told.spec)
                self.seen["finished"] += 1
                del self.here[e.request]
        for request in [r for r, told in self.here.items() if told.is_cancelled]:
            del self.here[request]
        late = [r for r, told in self.here.items() if told.ends_by <= self.runs]
        assert not late, f"{late} are still here after {self.runs} Runs"

    def cancel(self) -> None:
        told = self.rng.choice(list(self.here.values()))
        request, attempt = told.spec.request, told.spec.attempt
        assert self.batcher.cancel(request, attempt) is not told.is_cancelled
        told.is_cancelled = True
        if self.run is None or all(s.request != request for s in self.run.segments):
            del self.here[request]

    def step(self, is_ending: bool) -> None:
        """One random call that may be made now."""
        draw = self.rng.random()
        if self.here and draw < 0.06:
            self.cancel()
        elif draw < 0.35 and not is_ending:
            self.add()
        elif self.run is None:
            self.next_run()
        else:
            self.commit()
        self.batcher.validate()
        assert self.batcher.running + self.batcher.waiting == len(self.here)
        assert self.batcher.has_work == bool(self.here)


def reference_start(prompt: list[int], tokens: int) -> tuple[int, ...]:
    """What an earlier attempt generated."""
    return tuple(reference(SequenceSpec("", 0, prompt, SamplingParams(tokens))))


def play(seed: int) -> Counter[str]:
    """Run one sequence to its end; what was seen on the way."""
    rng = random.Random(f"batcher {seed}")
    sequences_max = rng.randint(1, 4)
    config = BatcherConfig(
        kv_blocks=rng.randint(2, 10),
        block_tokens=rng.randint(1, 4),
        run_tokens_max=sequences_max + rng.randint(0, 8),
        sequences_max=sequences_max,
        oldest_prompt_percent=rng.choice([1, 50, 100]),
        growth_tokens=rng.choice([0, 0, 2, 100]),
    )
    batcher = Batcher(config, LayerSpan(0, 3))
    sequence = Sequence(rng, batcher, KVDouble.of(batcher))
    for _ in range(rng.randint(5, 40)):
        sequence.step(is_ending=False)
    while sequence.here or sequence.run is not None:
        sequence.step(is_ending=True)
    assert batcher.pool.used == 0
    if config.growth_tokens == 100:
        assert batcher.room.preemptions == 0, "nobody is admitted who could run out"
    sequence.seen["reused"] += batcher.room.reused_tokens
    return sequence.seen


@pytest.mark.more
def test_random_sequences_of_calls_keep_every_rule() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEQUENCES):
        try:
            seen += play(seed)
        except Exception as error:
            raise AssertionError(f"sequence {seed}: {error}") from error
    # Else the draws would have become too tame to show anything.
    assert seen["finished"] > SEQUENCES
    assert seen["preemptions"] > SEQUENCES // 5
    assert seen["reused"] > SEQUENCES
