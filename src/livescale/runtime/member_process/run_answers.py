"""What Runs give besides tokens: log probabilities, and embeddings. Kept until the token goes out.

A Run of a leader elsewhere (a model in stages) gives them to that one: they travel with its
Visited, and the leader's worker adds sums of rows up as those of its own Runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, RunPart
from livescale.engine.base.run_result import RowSum, RunResult
from livescale.engine.embeddings import Embeddings, Summed
from livescale.values.types import InstanceId, RequestId, TokenLogprobs, Value

SUM_BYTES = 4
"""Of a value of a sum."""
_Attempt = tuple[RequestId, int]


class Besides(Value, frozen=True):
    """What travels with a Visited: log probabilities of tokens, and of what the sums of rows are
    that follow as bytes, in this order: fp32, little-endian, as many values each."""

    logprobs: tuple[tuple[RequestId, int, TokenLogprobs], ...] = ()
    summed: tuple[Summed, ...] = ()


@dataclass(slots=True)
class RunAnswers:
    """Of one worker."""

    _embeddings: Embeddings = field(default_factory=Embeddings)
    #: of the tokens that go out next
    _logprobs: dict[_Attempt, TokenLogprobs] = field(default_factory=dict)
    _complete: dict[_Attempt, bytes] = field(default_factory=dict)
    #: of the Run that has just ended
    _leaving: dict[BatchKey, tuple[Besides, bytes]] = field(default_factory=dict)

    def ran(self, run: Run, result: RunResult, instance: InstanceId | None) -> None:
        """A Run of this instance is over."""
        self._leaving.clear()
        if result.step is not None:
            for tokens in result.step.tokens:
                if tokens.request in result.logprobs:
                    key = (tokens.request, tokens.attempt)
                    self._logprobs[key] = result.logprobs[tokens.request]
            return
        if not (result.logprobs or result.row_sums):
            return
        own = list(run.segments)
        if run.is_visit:
            own = []
            for part in run.parts:
                if part.key.target == instance:
                    own += part.segments
                else:
                    self._leaving[part.key] = _besides(part, result)
        for segment in own:
            logprobs = result.logprobs.get(segment.request)
            if logprobs is not None:
                self._logprobs[segment.request, segment.attempt] = logprobs
        self._add(map(Summed.of, own), result.row_sums)

    def leaves(self, key: BatchKey) -> tuple[Besides | None, bytes]:
        """What goes with the Visited of this Run, which has just ended."""
        return self._leaving.pop(key, (None, b""))

    def came(self, besides: Besides, content: bytearray) -> None:
        """With a Visited. Raises ValueError for bytes that are not as many sums."""
        for request, attempt, logprobs in besides.logprobs:
            self._logprobs[request, attempt] = logprobs
        if besides.summed:
            rows = np.frombuffer(content, "<f4").reshape(len(besides.summed), -1)
            sums = {its.request: row for its, row in zip(besides.summed, rows, strict=True)}
            self._add(besides.summed, sums)

    def of(self, emitted: EmittedTokens) -> tuple[TokenLogprobs | None, bytes | None]:
        """What goes out with the token."""
        attempt = (emitted.request, emitted.attempt)
        return self._logprobs.pop(attempt, None), self._complete.pop(attempt, None)

    @property
    def is_empty(self) -> bool:
        """Nothing waits for a token, or for the end of a prompt."""
        return not self._logprobs and not self._complete and self._embeddings.is_empty

    def keep(self, requests: Iterable[_Attempt]) -> None:
        """What belongs to others is not wanted any more."""
        wanted = dict.fromkeys(requests)
        self._embeddings.keep(wanted)
        self._logprobs = {key: its for key, its in self._logprobs.items() if key in wanted}
        self._complete = {key: its for key, its in self._complete.items() if key in wanted}

    def _add(self, summed: Iterable[Summed], sums: Mapping[RequestId, RowSum]) -> None:
        self._complete |= self._embeddings.take(summed, sums)


def _besides(part: RunPart, result: RunResult) -> tuple[Besides, bytes]:
    """Of one leader's Run."""
    logprobs = [
        (s.request, s.attempt, result.logprobs[s.request])
        for s in part.segments
        if s.request in result.logprobs
    ]
    summed = [Summed.of(s) for s in part.segments if s.request in result.row_sums]
    content = b"".join(result.row_sums[its.request].astype("<f4").tobytes() for its in summed)
    return Besides(tuple(logprobs), tuple(summed)), content
