"""The PID controller of QUART Eq. 3, for whole replicas.

The paper prints e = T_target - T_i, which with positive gains takes replicas from a stage that is
late. Here the error is positive where requests wait too long.
"""

from __future__ import annotations

from dataclasses import dataclass

from livescale.values.types import Value


class Gains(Value, frozen=True):
    """Replicas per unit of the error, of its sum over periods, and of its change per period.

    The sum is kept within ± `integral_max` periods, so that a long overload is soon forgotten.
    """

    proportional: float = 1.0
    integral: float = 0.25
    derivative: float = 0.25
    integral_max: float = 8.0

    def __post_init__(self) -> None:
        if min(self.proportional, self.integral, self.derivative, self.integral_max) < 0:
            raise ValueError(f"gains must not be negative: {self}")


class PidTerms(Value, frozen=True):
    """What each part of the controller adds, in replicas."""

    proportional: float
    integral: float
    derivative: float

    @property
    def replicas(self) -> float:
        """The change that the controller asks for: Eq. 3."""
        return self.proportional + self.integral + self.derivative


@dataclass(slots=True)
class Pid:
    """State of one controller: the last error, and the sum of errors over periods."""

    gains: Gains
    error: float | None = None
    integral: float = 0.0

    def step(self, error: float, periods: float, *, held: int = 0) -> PidTerms:
        """What to do about this error, `periods` after the one before.

        `held` is the sign of a change that could not be made last time: in that direction errors
        are not added up (anti-windup). Where the error changes its sign the sum begins anew: what
        was too slow before is no reason to overshoot now.
        """
        before = error if self.error is None else self.error
        if error * before < 0:
            self.integral = 0.0
        if error * held <= 0:
            summed = self.integral + error * periods
            self.integral = max(-self.gains.integral_max, min(summed, self.gains.integral_max))
        change = (error - before) / periods if periods > 0 else 0.0
        self.error = error
        return PidTerms(
            self.gains.proportional * error,
            self.gains.integral * self.integral,
            self.gains.derivative * change,
        )
