"""Ways to scale the stages of a line: one seam, so that comparisons differ in nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from livescale.control.stages.core_budget import CoresSeen
from livescale.control.stages.corrector import StageDecision
from livescale.control.stages.formulas.stage_load import StageLoad
from livescale.control.stages.key_stages import KeyStage
from livescale.control.stages.line_scaling import LineScaling
from livescale.control.stages.rate_scaling import RateScaling
from livescale.values.scaling_policies import LinePolicy, StagesByRate


class LineStrategy(Protocol):
    """Of one line of stages."""

    def step(
        self,
        now_ns: int,
        loads: Sequence[StageLoad],
        limits: Sequence[tuple[int, int]],
        total: int,
        cores: CoresSeen | None = None,
    ) -> list[StageDecision]:
        """Once per period, a decision per stage. Each stage stays within its `limits`, and all
        together have at most `total` replicas, unless the least numbers alone are more. `cores` are
        those that there are (None: they are left alone)."""

    @property
    def key_stages(self) -> Mapping[int, KeyStage]:
        """As of the last step, by number; a strategy that knows none has none."""


def line_strategy(policy: LinePolicy) -> LineStrategy:
    """The strategy of a configuration value, which remembers what one line did."""
    return RateScaling(policy) if isinstance(policy, StagesByRate) else LineScaling(policy)
