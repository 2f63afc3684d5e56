"""Runs of Segments: what a Batcher asks an executor to do, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from livescale.latency.work import RunWork
from livescale.types import (
    FinishReason,
    InstanceId,
    LayerSpan,
    RequestId,
    SamplingParams,
    Value,
)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A request as an instance gets it.

    `prompt_ids` may be any sequence of ints (the simulator passes a `range`). `generated_ids` are
    tokens that an earlier attempt already emitted: they are computed again as prompt, and the
    index of the next token goes on from them. Only requests with equal `cache_salt` share KV
    blocks of equal beginnings. Where tokens are not real, `content` names them: requests with the
    same name have the same tokens at the same positions, others nothing in common. `moves` is how
    often the attempt went from one instance to another, with the way to here.
    """

    request: RequestId
    attempt: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    generated_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    content: str = ""
    moves: int = 0


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Consecutive positions of one request inside a Run.

    Positions `[first_position, first_position + token_count)` are computed; `token_ids` are their
    input ids; position p of the request lives in KV block `block_table[p // block_tokens]`. Blocks
    of earlier positions may be shared with other requests; those written here never are.
    `samples` is True when the logits of the last position decide the next token; `prompt_ids` and
    `generated_ids` are then all tokens known so far (they may be the Batcher's own lists, which
    grow when the Run is committed).
    """

    request: RequestId
    attempt: int
    first_position: int
    token_ids: Sequence[int]
    block_table: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    prompt_ids: Sequence[int] = ()
    generated_ids: Sequence[int] = ()

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens that the segment's last position attends to, itself included."""
        return self.first_position + len(self.token_ids)


class BatchKey(Value, frozen=True, order=True):
    """A live batch: the target instance that formed it, and its number there."""

    target: InstanceId
    number: int

    def __str__(self) -> str:
        return f"{self.target}/{self.number}"


class Run(msgspec.Struct, frozen=True, gc=False):
    """What an executor does next: a list of Segments over one LayerSpan.

    Hidden rows, where a span starts or ends inside the model, lie in segment order, one row per
    position: shape (token_count, hidden size). They are those of the live `batch`, if it has one.

    A Run of several `steps` stands for that many Runs, one after the other, of the same decodes:
    segments are the first one's, and each step goes on where the last one ended.
    """

    id: int
    span: LayerSpan
    segments: tuple[Segment, ...]
    steps: int = 1
    batch: BatchKey | None = None

    @property
    def token_count(self) -> int:
        return sum([len(segment.token_ids) for segment in self.segments])

    @property
    def work(self) -> RunWork:
        """What is computed, without for whom. Of several steps it is the first one's."""
        prefills = []
        decodes = context_tokens = sampled = 0
        for segment in self.segments:
            count = len(segment.token_ids)
            sampled += segment.samples
            if segment.samples and count == 1:
                decodes += 1
                context_tokens += segment.first_position + 1
            else:
                prefills.append((count, segment.first_position))
        return RunWork(tuple(prefills), decodes, context_tokens, sampled)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of segments that compute more than one position or do not sample."""
        if self.steps > 1:
            return 0
        counts = [(len(segment.token_ids), segment.samples) for segment in self.segments]
        return sum([count for count, samples in counts if count > 1 or not samples])


class EmittedTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request from one Run: one per step, the first is its `index`-th (from 0).

    The first ones say how many of the prompt's tokens were found in the prefix index.
    """

    request: RequestId
    attempt: int
    index: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    cached_tokens: int = 0
