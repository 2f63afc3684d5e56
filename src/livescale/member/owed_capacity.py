"""The rate of prefills that the controller asked an instance for, once."""

from __future__ import annotations

from livescale.batching.contract.serving import Capabilities
from livescale.messages.commands import StartHolding
from livescale.messages.events import CapacityMeasured

_TOKENS_MAX = 2048
"""Of a Run that measures a rate: long enough that its fixed cost does not count."""


class OwedCapacity:
    """`kind` is that of the devices, `run_tokens_max` the token budget of a Run."""

    def __init__(self, order: StartHolding, kind: str, run_tokens_max: int) -> None:
        #: a rate is that of a Run full of prompt tokens
        self.measured_tokens = min(run_tokens_max, _TOKENS_MAX)
        self._kind, self._model = kind, order.model
        #: the rate was asked for and is not known yet
        self.is_owed = order.measure_capacity

    def take(self, can: Capabilities, rate: int | None) -> CapacityMeasured | None:
        """What to report, if it was asked for and is known: `rate`, or what Runs took."""
        rate = rate or can.prefill_tokens_per_s
        if not self.is_owed or rate is None:
            return None
        self.is_owed = False
        return CapacityMeasured(self._kind, self._model, rate, can.kv_blocks)
