"""The list of key stages (QUART §5.1, §6.1): where requests wait, or did so lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.values.types import Value


class KeyStage(Value, frozen=True):
    """Why a stage is on the list (`over_target` or `longest_queue`), and until when it stays there
    if that is so no more."""

    reason: str
    until_ns: int


@dataclass(slots=True)
class KeyStages:
    """A stage is on the list when its T_i is over its target, or when its queue is the longest.

    The queue counts from one request on; of equals the first stage is meant. A stage leaves when
    neither has been so for `scale_down_timeout_ns`.
    """

    scale_down_timeout_ns: int
    #: the key stages, in order; replaced at each step
    listed: dict[int, KeyStage] = field(default_factory=dict)

    def step(self, now_ns: int, loads: Sequence[StageLoad], over_target: Sequence[bool]) -> None:
        """`over_target[i]` belongs to `loads[i]`. Stages that have no load any more leave."""
        longest = max(loads, key=lambda load: (load.waiting, -load.stage), default=None)
        until_ns = now_ns + self.scale_down_timeout_ns
        known = dict(self.listed)
        for load, is_over in zip(loads, over_target, strict=True):
            if is_over:
                known[load.stage] = KeyStage("over_target", until_ns)
            elif load is longest and load.waiting > 0:
                known[load.stage] = KeyStage("longest_queue", until_ns)
        stages = {load.stage for load in loads}
        self.listed = {
            stage: key
            for stage, key in sorted(known.items())
            if stage in stages and now_ns < key.until_ns
        }
