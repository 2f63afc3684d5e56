"""What gateways and workers tell each other of attempts at requests. Values only.

Prompts and tokens travel beside these, in the way of each world.
"""

from __future__ import annotations

from livescale.values.types import RequestId, Value


class Cancel(Value, frozen=True, tag=True):
    """Gateway to worker: this attempt is not read any more."""

    request: RequestId
    attempt: int


class Disown(Value, frozen=True, tag=True):
    """Gateway to worker: another worker runs this attempt, or (`moves` None) a newer one. There is
    no answer.

    `moves` is how often the attempt was taken over, as far as the gateway knew then: a worker that
    has taken it over later keeps it.
    """

    request: RequestId
    attempt: int
    moves: int | None = None


class AttemptTaken(Value, frozen=True, tag=True):
    """Worker to gateway: the attempt, which another worker had, is run here from now on. Sent
    before any of its tokens. `moves` is how often the attempt was taken over, with this time: the
    owner is the worker with the most moves, whatever comes first."""

    request: RequestId
    attempt: int
    moves: int = 1


class AttemptReturned(Value, frozen=True, tag=True):
    """Worker to gateway: the attempt was given up, and the request must run elsewhere."""

    request: RequestId
    attempt: int


class AttemptFailed(Value, frozen=True, tag=True):
    """Worker to gateway: the attempt could not run."""

    request: RequestId
    attempt: int
    reason: str
