"""What simulated workers and the simulated gateway send each other. Values only.

As on a real pool's wires, with positions in the place of token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from livescale.batching.run import EmittedTokens, SequenceSpec
from livescale.messages import attempts
from livescale.types import InstanceId, Value


class SimSubmit(Value, frozen=True):
    """Gateway to worker: run this attempt."""

    instance: InstanceId
    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class SimTokens:
    """Worker to gateway: what a Run brought. `step_ns` are the times at which its steps ended;
    the tokens of a request are those of the last steps."""

    step_ns: list[int]
    emitted: list[EmittedTokens]


ToWorkerMessage = SimSubmit | attempts.Cancel | attempts.Disown
FromWorkerMessage = (
    SimTokens | attempts.AttemptFailed | attempts.AttemptTaken | attempts.AttemptReturned
)
