"""What simulated workers and the simulated gateway tell each other, and workers among themselves.

Values only. As on a real pool's wires, with positions in the place of token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from livescale.batching.live_messages import LiveMessage
from livescale.batching.run import EmittedTokens, SequenceSpec
from livescale.types import InstanceId, RequestId, Value


class SimSubmit(Value, frozen=True):
    """Gateway to worker: run this attempt."""

    instance: InstanceId
    spec: SequenceSpec


class SimCancel(Value, frozen=True):
    """Gateway to worker: nobody reads this attempt any more."""

    request: RequestId
    attempt: int


class SimDisown(Value, frozen=True):
    """Gateway to worker: somebody else runs this attempt, or a newer one."""

    request: RequestId
    attempt: int


class SimAttemptFailed(Value, frozen=True):
    """Worker to gateway: the attempt could not run."""

    request: RequestId
    attempt: int
    reason: str


class SimAttemptTaken(Value, frozen=True):
    """Worker to gateway: the attempt is run here from now on. `moves`: it was taken over so often,
    with this time."""

    request: RequestId
    attempt: int
    moves: int


class SimAttemptReturned(Value, frozen=True):
    """Worker to gateway: the attempt was given up, and the request must run elsewhere."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class SimTokens:
    """Worker to gateway: what a Run brought. `step_ns` are the times at which its steps ended;
    the tokens of a request are those of the last steps."""

    step_ns: list[int]
    emitted: list[EmittedTokens]


class RankLayers(Value, frozen=True):
    """To rank 0 of a live instance: a rank has layers 0…watermark-1."""

    instance: InstanceId
    rank: int
    watermark: int


ToWorkerMessage = SimSubmit | SimCancel | SimDisown
FromWorkerMessage = SimTokens | SimAttemptFailed | SimAttemptTaken | SimAttemptReturned
PeerMessage = LiveMessage | RankLayers
