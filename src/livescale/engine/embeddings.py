"""Embeddings of prompts whose positions several Runs computed: the mean of their rows. No torch.

Each Run gives the sum over the positions that it computed (`RunResult.row_sums`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from livescale.batching.runs.run import Segment
from livescale.engine.base.run_result import RowSum
from livescale.values.types import RequestId, Value


class Summed(Value, frozen=True):
    """Positions of a prompt whose rows a Run summed up: `[first_position, stop)`, the last ones of
    the prompt if it `is_last`."""

    request: RequestId
    attempt: int
    first_position: int
    stop: int
    is_last: bool

    @classmethod
    def of(cls, segment: Segment) -> Summed:
        return cls(
            request=segment.request,
            attempt=segment.attempt,
            first_position=segment.first_position,
            stop=segment.context_tokens,
            is_last=segment.samples,
        )


class Embeddings:
    """Of one instance: sums of the prompts that are under way."""

    def __init__(self) -> None:
        self._sums: dict[tuple[RequestId, int], RowSum] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    def take(
        self, ran: Iterable[Summed], row_sums: Mapping[RequestId, RowSum]
    ) -> dict[tuple[RequestId, int], bytes]:
        """A Run of these is over. Returns the embeddings of the prompts (with their attempts) that
        are complete with it: (hidden) fp32, little-endian.

        A prompt that begins anew forgets what was summed up. One whose beginning is not known was
        forgotten (`keep`): nothing comes of it.
        """
        complete: dict[tuple[RequestId, int], bytes] = {}
        for its in ran if row_sums else ():
            total = row_sums.get(its.request)
            if total is None:
                continue
            key = (its.request, its.attempt)
            before = self._sums.pop(key, None)
            if its.first_position:
                if before is None:
                    continue
                total = before + total
            if its.is_last:
                complete[key] = (total / its.stop).astype("<f4").tobytes()
            else:
                self._sums[key] = total
        return complete

    def keep(self, requests: Iterable[tuple[RequestId, int]]) -> None:
        """Forget what belongs to none of these (request, attempt)."""
        self._sums = {key: self._sums[key] for key in requests if key in self._sums}

    def __repr__(self) -> str:
        return f"<Embeddings of {list(self._sums)}>"
