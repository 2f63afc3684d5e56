"""What is measured of one stage in one window, and how long requests are there by that."""

from __future__ import annotations

import math

from livescale.control.stages.formulas import queueing
from livescale.values.types import Value
from livescale.values.units import NS_PER_S


class StageLoad(Value, frozen=True):
    """The load of one stage, and what it has.

    `replicas` counts those that serve or are still loading, so that a load is not ordered twice.
    `service_ns` is the time of one request at one replica (1 / mu). `waiting` requests are in the
    queue, on average over the window. The coefficients of variation are those of the gaps between
    arrivals and of service times; None: not known, reckoned as 1 (M/M/c).
    """

    stage: int
    replicas: int
    arrivals_per_s: float
    service_ns: int
    waiting: int = 0
    arrival_cv: float | None = None
    service_cv: float | None = None

    def __post_init__(self) -> None:
        if self.service_ns <= 0 or min(self.replicas, self.arrivals_per_s, self.waiting) < 0:
            raise ValueError(f"a load that cannot be: {self}")

    @property
    def served_per_s(self) -> float:
        """By one replica: mu."""
        return NS_PER_S / self.service_ns

    @property
    def variability(self) -> float:
        """(Ca² + Cs²) / 2."""
        cvs = (self.arrival_cv, self.service_cv)
        return queueing.variability(*(1.0 if cv is None else cv for cv in cvs))

    @property
    def least_stable(self) -> int:
        """The fewest replicas that are faster than the arrivals."""
        return queueing.least_stable(self.arrivals_per_s, self.served_per_s)

    def wait_ns(self, replicas: int) -> float:
        """Mean time in the queue with so many replicas; infinite where there is no steady state.

        Allen and Cunneen's, or what waits now divided among the replicas if that is longer: the
        formula knows nothing of a backlog that an overload has left. In a steady state the second
        is rho times the first, so it adds nothing.
        """
        if replicas < self.least_stable:
            return math.inf
        wait_s = queueing.mmc_wait(self.arrivals_per_s, self.served_per_s, replicas)
        if wait_s == math.inf:
            return math.inf
        backlog_ns = self.waiting * self.service_ns / replicas
        return max(wait_s * self.variability * NS_PER_S, backlog_ns)

    def sojourn_ns(self, replicas: int) -> float:
        """Mean time in queue and service (T_i); infinite where there is no steady state."""
        return self.wait_ns(replicas) + self.service_ns

    def replicas_needed(self, wait_max_ns: int, drain_ns: int, most: int) -> int | None:
        """The fewest (at least 1) whose mean wait is `wait_max_ns` in the steady state, and that
        serve within `drain_ns` what waits beyond that; None: `most` do not suffice.

        Little's law says how many wait while the mean wait is `wait_max_ns`. That everything
        waiting should be over within `wait_max_ns` instead would ask for several times as many
        replicas for each overload, most of which would come when it has passed.
        """
        backlog = self.waiting - self.arrivals_per_s * wait_max_ns / NS_PER_S
        to_serve_per_s = self.arrivals_per_s + max(backlog, 0.0) * NS_PER_S / drain_ns
        for_backlog = queueing.least_stable(to_serve_per_s, self.served_per_s)
        for_arrivals = queueing.servers_needed(
            self.arrivals_per_s,
            self.served_per_s,
            wait_max_ns / NS_PER_S,
            most,
            self.variability,
        )
        if for_arrivals is None or for_backlog > most:
            return None
        return max(for_arrivals, for_backlog)
