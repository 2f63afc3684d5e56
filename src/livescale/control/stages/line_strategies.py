"""Ways to scale the stages of a line: one seam, so that comparisons differ in nothing else."""

from __future__ import annotations

from livescale.control.stages.line_scaling import LineScaling
from livescale.control.stages.rate_scaling import RateScaling
from livescale.values.scaling_policies import LinePolicy, StagesByRate


def line_strategy(policy: LinePolicy) -> LineScaling | RateScaling:
    """The strategy of a configuration value, which remembers what one line did."""
    return RateScaling(policy) if isinstance(policy, StagesByRate) else LineScaling(policy)
