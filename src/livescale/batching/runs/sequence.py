"""One request on an instance: what is known of it, what is computed, where its KV lies.

Also how its blocks are named in the prefix index. No decisions: these are the Batcher's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec

from livescale.batching.runs.blocks import BlockPool
from livescale.batching.runs.run import EmittedTokens, Segment, SequenceSpec
from livescale.values.types import FinishReason

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request that is here, waiting or running.

    `order` numbers arrivals. `known_tokens` are those of the prompt and the `generated` ones;
    `computed` positions have their KV written in every layer; `prefill_tokens` were known when the
    request came or was last preempted.
    """

    spec: SequenceSpec
    order: int
    block_tokens: int
    generated: list[int]
    #: counted, since every step asks for it
    known_tokens: int
    prefill_tokens: int
    block_table: tuple[int, ...] = ()
    computed: int = 0
    #: it had its blocks, and emitted a token here, at least once
    is_admitted: bool = False
    is_started: bool = False
    #: of the prompt, found in the prefix index before its first token
    cached_tokens: int = 0
    #: it was part of a live batch, or waits for others that are in a Run: its place among the
    #: others is not that of its arrival
    was_held: bool = False
    #: another instance has taken it over; only its KV is still read here
    is_elsewhere: bool = False
    _keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, spec: SequenceSpec, order: int, block_tokens: int) -> SequenceState:
        """The request as it arrives."""
        known = spec.known_tokens
        return cls(spec, order, block_tokens, list(spec.generated_ids), known, known)

    @property
    def tokens_left(self) -> int:
        """Known tokens that are not computed: 1 while it decodes, more while it is a prompt."""
        return self.known_tokens - self.computed

    @property
    def tokens_max(self) -> int:
        """Positions the request can ever need KV for: the last generated token needs none."""
        return len(self.spec.prompt_ids) + self.spec.sampling.output_tokens_max - 1

    @property
    def outputs_left(self) -> int:
        """Tokens that it may still generate."""
        return self.spec.sampling.output_tokens_max - len(self.generated)

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """The known tokens at positions `[start, stop)`; those of a prompt that is a `range` are
        not copied."""
        prompt = self.spec.prompt_ids
        split = len(prompt)
        if start >= split:
            if stop == start + 1 == self.known_tokens:  # by far the most: a decode
                return (self.generated[-1],)
            return tuple(self.generated[start - split : stop - split])
        if stop <= split and isinstance(prompt, range):
            return prompt[start:stop]
        return tuple(prompt[start : min(stop, split)]) + tuple(
            self.generated[: max(stop - split, 0)]
        )

    def keys(self, start: int, stop: int) -> list[bytes]:
        """Name the content of the request's blocks `[start, stop)`, whose tokens are all known.

        A key hashes the previous block's key and the block's token ids; the first block follows the
        request's salt. Equal keys mean equal tokens from the first position on (up to a collision
        of BLAKE2b, which cannot be made). Tokens that are not real are named, not hashed.
        """
        if self.spec.content:
            name = f"{self.spec.cache_salt}/{self.spec.content}"
            return [f"{name}/{block}".encode() for block in range(start, stop)]
        keys, size = self._keys, self.block_tokens
        assert stop * size <= self.known_tokens, f"{self.spec.request}: block {stop - 1}"
        while len(keys) < stop:
            before = keys[-1] if keys else blake2b(self.spec.cache_salt.encode()).digest()
            first = len(keys) * size
            content = _encode([*self.token_ids(first, first + size)])
            keys.append(blake2b(before + content, digest_size=32).digest())
        return keys[start:stop]

    def key(self, block: int) -> bytes:
        """As `keys`, of one block."""
        return self.keys(block, block + 1)[0]

    def reusable_keys(self, first: int = 0) -> Iterator[bytes]:
        """Keys, from the `first` block on, of the blocks that may be taken from other requests.

        These are all full ones before the last token, which is always computed, because its
        logits are wanted. Where the rows of all positions are wanted there are none.
        """
        if self.spec.sampling.embeds:
            return
        for block in range(first, (self.known_tokens - 1) // self.block_tokens):
            yield self.key(block)

    def segment(self, count: int, *, samples: bool) -> Segment:
        """The next `count` positions in a Run."""
        spec, first = self.spec, self.computed
        return Segment(
            request=spec.request,
            attempt=spec.attempt,
            first_position=first,
            token_ids=self.token_ids(first, first + count),
            block_table=self.block_table,
            samples=samples,
            sampling=spec.sampling,
            prompt_ids=spec.prompt_ids,
            generated_ids=self.generated,
        )

    def write(self, pool: BlockPool, count: int) -> None:
        """So many further positions have their KV in every layer: blocks that they filled are
        found by requests that begin alike."""
        first = self.computed // self.block_tokens
        self.computed += count
        full = self.computed // self.block_tokens
        if full > first:
            pool.publish(self.block_table[first:full], self.keys(first, full))

    def learn(self, token_ids: Sequence[int]) -> None:
        """These follow the known tokens."""
        self.generated.extend(token_ids)
        self.known_tokens += len(token_ids)

    def emit(self, token_ids: Sequence[int]) -> EmittedTokens:
        """The last step's token is new; those before it are known already."""
        spec, token_id = self.spec, token_ids[-1]
        self.generated.append(token_id)
        self.known_tokens += 1
        generated = len(self.generated)
        index = generated - len(token_ids)
        reason = None
        if token_id in spec.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif generated >= spec.sampling.output_tokens_max:
            reason = FinishReason.LENGTH
        cached_tokens = min(self.cached_tokens, len(spec.prompt_ids)) if index == 0 else 0
        return EmittedTokens(spec.request, spec.attempt, index, token_ids, reason, cached_tokens)

    def as_spec(self) -> SequenceSpec:
        """As another instance, or a later attempt, gets the request: with what was generated."""
        return replace(self.spec, generated_ids=tuple(self.generated))

    def next_key(self) -> bytes | None:
        """The key of the block that is computed next, if another request's block would do."""
        return next(self.reusable_keys(self.computed // self.block_tokens), None)
