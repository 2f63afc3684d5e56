"""An executor double that writes token ids where a real one writes keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.run import Run, Segment, SequenceSpec

Place = tuple[int, int]
#: what a place of the KV cache holds: of which salt, which position, which token
Content = tuple[str, int, int]


@dataclass(slots=True)
class KVDouble:
    """Stores what was computed, and checks that every position attends to the right tokens.

    A place is written after its whole context was found to be right, so equal positions and
    tokens mean equal contexts, too.
    """

    batcher: Batcher
    salts: dict[str, str]
    places: dict[Place, Content]

    @classmethod
    def of(cls, batcher: Batcher) -> KVDouble:
        return cls(batcher, {}, {})

    def expect(self, spec: SequenceSpec) -> None:
        """The request is here: remember what a Segment does not tell."""
        self.salts[spec.request] = spec.cache_salt

    def run(self, run: Run) -> list[int]:
        """Execute the Run; what it samples depends on all that the cache holds of the request."""
        written: dict[Place, Content] = {}
        for segment in run.segments:
            self._check_context(segment)
            for place, content in self._writes(segment):
                assert place not in written, f"two segments write {place}"
                written[place] = content
        blocks = dict.fromkeys(block for block, _ in written)
        for block in blocks:
            assert self.batcher.pool.references(block) == 1, f"block {block} is shared"
            assert self.batcher.pool.key_of(block) is None, f"block {block} can be found"
        self.places |= written
        return [next_token(self._read(s)) for s in run.segments if s.samples]

    def _check_context(self, segment: Segment) -> None:
        known = [*segment.prompt_ids, *segment.generated_ids]
        salt, first = self.salts[segment.request], segment.first_position
        stop = first + segment.token_count
        assert segment.token_count > 0, segment
        assert list(segment.token_ids) == known[first:stop], segment
        assert segment.samples == (stop == len(known)), segment
        assert stop <= len(segment.block_table) * self.batcher.config.block_tokens, segment
        for position in range(first):
            held = self.places.get(self._place(segment, position))
            assert held == (salt, position, known[position]), (segment, position, held)

    def _writes(self, segment: Segment) -> list[tuple[Place, Content]]:
        salt, first = self.salts[segment.request], segment.first_position
        return [
            (self._place(segment, position), (salt, position, token_id))
            for position, token_id in enumerate(segment.token_ids, first)
        ]

    def _read(self, segment: Segment) -> list[int]:
        places = (self._place(segment, p) for p in range(segment.context_tokens))
        return [self.places[place][2] for place in places]

    def _place(self, segment: Segment, position: int) -> Place:
        number, offset = divmod(position, self.batcher.config.block_tokens)
        return segment.block_table[number], offset


def next_token(token_ids: list[int]) -> int:
    """A model of 10 tokens: the next one depends on every token and its position."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % 10


def reference(spec: SequenceSpec) -> list[int]:
    """All tokens that the request must generate, without batching or caching."""
    generated = list(spec.generated_ids)
    while len(generated) < spec.sampling.output_tokens_max:
        generated.append(next_token([*spec.prompt_ids, *generated]))
        if generated[-1] in spec.sampling.stop_token_ids:
            break
    return generated
