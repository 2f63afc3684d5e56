"""Which requests of a Run it is that an executor cannot compute: the others go on.

A Run that failed is carried out again in halves, and each half that fails in halves of that, on the
state before it: positions that are written twice get the same KV. `k` requests at fault among `n`
cost about `k` times the logarithm of `n` further Runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from livescale.batching.runs.run import Run, Segment
from livescale.values.types import RequestId, Value

Result = TypeVar("Result")


class RunFailed(Exception):
    """An executor cannot compute a Run, and can go on with others; the message says why."""


class FaultyRequest(Value, frozen=True):
    """A request of a Run that cannot be computed, in this attempt, and why. It
    `runs_elsewhere` where the instance is at fault."""

    request: RequestId
    attempt: int
    reason: str
    runs_elsewhere: bool = False

    def tell(
        self, refused: list[tuple[RequestId, int, str]], returned: list[tuple[RequestId, int]]
    ) -> None:
        """It is among these, or among those, from now on."""
        if self.runs_elsewhere:
            returned.append((self.request, self.attempt))
        else:
            refused.append((self.request, self.attempt, self.reason))


def find_faulty(
    run: Run, failure: RunFailed, execute: Callable[[Run], Result]
) -> tuple[list[tuple[Run, Result]], list[FaultyRequest]]:
    """The Run has failed: let `execute` compute the pieces of it that can be computed.

    Returns these with what came of them, in segment order, and the requests of the segments between
    them. `execute` raises RunFailed for what cannot be computed.
    """
    if len(run.segments) == 1:
        (segment,) = run.segments
        return [], [FaultyRequest(segment.request, segment.attempt, str(failure))]
    middle = len(run.segments) // 2
    done: list[tuple[Run, Result]] = []
    faulty: list[FaultyRequest] = []
    for segments in (run.segments[:middle], run.segments[middle:]):
        half = msgspec.structs.replace(run, segments=segments, merged=())
        try:
            done.append((half, execute(half)))
        except RunFailed as again:
            more, at_fault = find_faulty(half, again, execute)
            done += more
            faulty += at_fault
    return done, faulty


def are_among(faulty: Sequence[FaultyRequest], segments: Sequence[Segment]) -> bool:
    """All of them are requests of these segments."""
    here = {(segment.request, segment.attempt) for segment in segments}
    return all((one.request, one.attempt) in here for one in faulty)
