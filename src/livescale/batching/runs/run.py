"""Runs of Segments: what a Batcher asks an executor to do, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from livescale.latency.work import RunWork
from livescale.values.types import (
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

    @property
    def known_tokens(self) -> int:
        """Those of the prompt, and those that were generated before."""
        return len(self.prompt_ids) + len(self.generated_ids)


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Consecutive positions of one request inside a Run.

    Positions `[first_position, first_position + token_count)` are computed; `token_ids` are their
    input ids; position p of the request lives in KV block `block_table[p // block_tokens]`. Blocks
    of earlier positions may be shared with other requests; those written here never are.
    `samples` is True when the logits of the last position decide the next token; `prompt_ids` and
    `generated_ids` are then all tokens known so far (they may be the Batcher's own lists, which
    grow when the Run is committed). One that `embeds` samples nothing: its token is 0.
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
    def chooses(self) -> bool:
        """The logits of its last position are wanted."""
        return self.samples and not self.sampling.embeds

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


class RunPart(NamedTuple):
    """Segments of a Run that have their rows under one name."""

    key: BatchKey
    segments: tuple[Segment, ...]

    @property
    def token_count(self) -> int:
        return sum([len(segment.token_ids) for segment in self.segments])

    @property
    def prefill_tokens(self) -> int:
        """As a Run's."""
        return _prefill_tokens(self.segments)

    @property
    def sampled(self) -> int:
        """Segments that give a token."""
        return sum([segment.samples for segment in self.segments])


class EngineAsk(Value, frozen=True):
    """What an engine that schedules by itself is told before its next step: requests that it takes,
    and (request, attempt) of those that it forgets, which comes first."""

    taken: tuple[SequenceSpec, ...] = ()
    forgotten: tuple[tuple[RequestId, int], ...] = ()


class Run(msgspec.Struct, frozen=True, gc=False):
    """What an executor does next: a list of Segments over one LayerSpan.

    Hidden rows, where a span starts or ends inside the model, lie in segment order, one row per
    position: shape (token_count, hidden size). They are those of the live `batch`, if it has one,
    or of a leader's Run that visits (`is_visit`), which `batch` names then. Several such Runs that
    are carried out as one are `merged`: the name of each, and how many of the segments are its.

    A Run of several `steps` stands for that many Runs, one after the other, of the same decodes:
    segments are the first one's, and each step goes on where the last one ended.

    A Run that `asks` is one step of an engine that schedules by itself, and has no segments.
    """

    id: int
    span: LayerSpan
    segments: tuple[Segment, ...]
    steps: int = 1
    batch: BatchKey | None = None
    is_visit: bool = False
    merged: tuple[tuple[BatchKey, int], ...] = ()
    asks: EngineAsk | None = None

    @property
    def parts(self) -> list[RunPart]:
        """What has a name, in the order of the segments: one, or each of those that are merged."""
        if self.batch is None:
            return []
        parts, first = [], 0
        for key, count in self.merged or ((self.batch, len(self.segments)),):
            parts.append(RunPart(key, self.segments[first : first + count]))
            first += count
        return parts

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
        return 0 if self.steps > 1 else _prefill_tokens(self.segments)


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


def _prefill_tokens(segments: Sequence[Segment]) -> int:
    counts = [(len(segment.token_ids), segment.samples) for segment in segments]
    return sum([count for count, samples in counts if count > 1 or not samples])
