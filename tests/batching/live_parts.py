"""Parts of a world of live instances: workers, what the gateway knows of a request, and executors
that write symbols where real ones write numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_double import next_token

from livescale.batching.lines.team_batcher import TeamBatcher
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import BatchKey, Run, Segment, SequenceSpec
from livescale.values.types import LayerSpan, RequestId, SamplingParams, WorkerRef

#: what a row, or a place of the KV cache, is: before or of which layer, after which tokens
Symbol = tuple[int, int]
Rows = tuple[Symbol, ...]
Payload = Rows | tuple[Rows, ...] | None


def prefixes(salt: str, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[int]:
    """A number per position that stands for all tokens up to it; those `before` are known."""
    states, state = [*before], before[-1] if before else hash(salt)
    for token_id in token_ids:
        state = hash((state, token_id))
        states.append(state)
    return states


class SymbolicExecutor:
    """Holds rows by batch and KV by layer, block and offset, and checks all that a Run reads."""

    def __init__(
        self,
        batcher: Batcher,
        salts: dict[RequestId, str],
        states: dict[tuple[RequestId, int], list[int]],
    ) -> None:
        self._batcher = batcher
        self._salts = salts
        #: by request and attempt, what stands for each position: told by who runs layer 0
        self._states = states
        self.rows: dict[BatchKey, Rows] = {}
        self._kv: dict[tuple[int, int, int], Symbol] = {}
        self._written: dict[tuple[int, int, int], Symbol] = {}
        self._published: dict[int, bytes] = {}
        #: layers below are done of the Run in flight
        self.layers_stop = 0

    def run(self, run: Run) -> list[int]:
        """Execute: check rows and KV that go in, write KV and rows, sample."""
        layers = range(max(run.span.start, 1), min(run.span.stop, self._layers + 1))
        before = tuple(row for part in run.parts for row in self.rows.pop(part.key, ()))
        after: list[Symbol] = []
        expected: list[Symbol] = []
        self._written = {}
        self.layers_stop = run.span.start
        for segment in run.segments:
            states = self._check(segment, run.span)
            first = segment.first_position
            stop = first + segment.token_count
            expected += [(run.span.start, state) for state in states[first:stop]]
            after += [(run.span.stop, state) for state in states[first:stop]]
            for layer in layers:
                for position in range(first):
                    held = self._kv.get((layer, *self._place(segment.block_table, position)))
                    assert held == (layer, states[position]), (segment, layer, position, held)
                for position in range(first, stop):
                    place = (layer, *self._place(segment.block_table, position))
                    assert place not in self._written, f"two segments write {place}"
                    self._written[place] = (layer, states[position])
        if run.span.start:
            assert before == tuple(expected), f"other rows than those of {run}"
        for block in dict.fromkeys(place[1] for place in self._written):
            assert self._batcher.pool.references(block) == 1, f"block {block} is shared"
            assert self._batcher.pool.key_of(block) is None, f"block {block} can be found"
        self._kv |= self._written
        if run.span.stop <= self._layers:
            assert run.parts
            rows = iter(after)
            for part in run.parts:
                self.rows[part.key] = tuple(itertools.islice(rows, part.token_count))
        known = ([*s.prompt_ids, *s.generated_ids] for s in run.segments if s.samples)
        return [next_token(token_ids) for token_ids in known]

    def check_untouched(self) -> None:
        """Nobody has written over what the last Run wrote."""
        for place, symbol in self._written.items():
            assert self._kv[place] == symbol, f"{place} was written during a Run"

    def export_kv(self, layer: int, places: Sequence[tuple[int, tuple[int, ...]]]) -> Payload:
        """One layer's KV of a batch, per request in token order."""
        for tokens, table in places:
            written = any((layer, *self._place(table, p)) in self._written for p in range(tokens))
            assert layer < self.layers_stop or not written, f"layer {layer} is not done"
        return tuple(
            tuple(self._kv[layer, *self._place(table, p)] for p in range(tokens))
            for tokens, table in places
        )

    def import_kv(
        self, layer: int, places: Sequence[tuple[int, tuple[int, ...]]], payload: Payload
    ) -> None:
        """Write what `export_kv` gave, but for requests that have no table here any more."""
        assert payload is not None
        for (tokens, table), rows in zip(places, payload, strict=True):
            assert len(rows) == tokens
            for position, symbol in enumerate(rows):
                if table:
                    assert isinstance(symbol, tuple)
                    block, offset = self._place(table, position)
                    assert self._batcher.pool.references(block) == 1
                    self._kv[layer, block, offset] = symbol

    def check_published(self) -> None:
        """What can be found by a key is there in every layer."""
        pool = self._batcher.pool
        published = {b: key for b in range(pool.blocks) if (key := pool.key_of(b)) is not None}
        for block, key in published.items():
            if self._published.get(block) == key:
                continue
            for offset in range(pool.block_tokens):
                first = self._kv[1, block, offset]
                for layer in range(1, self._layers + 1):
                    assert self._kv[layer, block, offset] == (layer, first[1]), (block, layer)
        self._published = published

    @property
    def _layers(self) -> int:
        return self._batcher.span.stop - 2

    def _check(self, segment: Segment, span: LayerSpan) -> list[int]:
        """States of all positions up to the segment's last one."""
        known = [*segment.prompt_ids, *segment.generated_ids]
        first, stop = segment.first_position, segment.context_tokens
        assert segment.token_count > 0, segment
        assert stop <= len(segment.block_table) * self._batcher.config.block_tokens, segment
        states = self._states.setdefault((segment.request, segment.attempt), [])
        if known:
            found = prefixes(self._salts[segment.request], known)
            assert not span.start or found[: len(states)] == states[: len(found)], segment
            states[:] = found
        elif not span.start:  # of a visit, whose known tokens are not told: a part of a prompt
            before = states[:first]
            states[:] = prefixes(self._salts[segment.request], segment.token_ids, before)
        if not span.start and known:
            assert list(segment.token_ids) == known[first:stop], segment
        return states

    def _place(self, table: Sequence[int], position: int) -> tuple[int, int]:
        number, offset = divmod(position, self._batcher.config.block_tokens)
        return table[number], offset


@dataclass
class Node:
    """One worker and its instance, which may go."""

    ref: WorkerRef
    serving: TeamBatcher | None
    executor: SymbolicExecutor
    is_alive: bool = True
    #: the Run in flight, its tokens and when it began
    run: Run | None = None
    tokens: list[int] = field(default_factory=list)
    began_ns: int = 0
    #: the Run that was chosen to follow it, and its tokens
    ahead: tuple[Run, list[int]] | None = None
    #: a Run, or a layer, has just ended, and what waits may be taken in
    is_between: bool = False
    #: waits for the end of a Run, or of a layer; most of it for a time without any Run
    inbox: list[tuple[Callable[[], None], Callable[[], bool]]] = field(default_factory=list)
    wake_ns: int | None = None
    runs: int = 0

    @property
    def live(self) -> LiveBatcher | None:
        """What serves alone."""
        return self.serving.inner if self.serving is not None else None


@dataclass
class Transcript:
    """What came of a request."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    finished_ns: int = 0

    def spec(self, request: RequestId, attempt: int) -> SequenceSpec:
        return SequenceSpec(
            request=request,
            attempt=attempt,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            generated_ids=tuple(self.tokens),
            cache_salt=self.salt,
        )


@dataclass(frozen=True)
class Target:
    """One loading instance: when `watermark` reaches each further layer."""

    layer_ns: tuple[int, ...]
    config: BatcherConfig
    order: str = "zigzag"
    has_source: bool = True
