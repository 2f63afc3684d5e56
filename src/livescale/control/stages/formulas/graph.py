"""Which stage comes after which: a line, or a graph without cycles."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.values.types import Value


class StageGraph(Value, frozen=True):
    """`followers[i]` are the stages that get what stage `i` has computed, in rising order.

    Every stage comes before its followers, so there are no cycles.
    """

    followers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for stage, after in enumerate(self.followers):
            if list(after) != sorted(set(after)):
                raise ValueError(f"followers of stage {stage} are not in rising order: {after}")
            if after and not stage < after[0] <= after[-1] < len(self.followers):
                raise ValueError(f"followers of stage {stage} do not come after it: {after}")

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.followers)

    def before(self, stage: int) -> tuple[int, ...]:
        """Those that this one follows, in rising order."""
        return tuple(i for i, after in enumerate(self.followers) if stage in after)

    def neighbours(self, stage: int) -> tuple[int, ...]:
        """N(i) of QUART Eq. 7: the stages right before and right after this one."""
        return (*self.before(stage), *self.followers[stage])

    @property
    def is_line(self) -> bool:
        """Each stage stands before the next, and no other."""
        return self == line(self.stages)

    def longest_path(self, weights: Sequence[int]) -> int:
        """The largest sum of weights, one per stage, along a way through the graph."""
        from_here = [0] * self.stages
        for stage in reversed(range(self.stages)):
            rest = max((from_here[after] for after in self.followers[stage]), default=0)
            from_here[stage] = weights[stage] + rest
        return max(from_here, default=0)


def line(stages: int) -> StageGraph:
    """Each stage before the next."""
    return StageGraph(tuple((i + 1,) if i + 1 < stages else () for i in range(stages)))
