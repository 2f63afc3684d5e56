"""How many threads of a team compute the next Run. Values only."""

from __future__ import annotations

WINDOW_RUNS = 16
"""Runs whose waiting is judged together."""

WAITED_MAX = 0.4
"""Share of their time that threads may wait for each other. Threads that have their cores for
themselves wait for a fifth of it at most: the last pieces of a phase are not even."""

SPELL_RUNS, SPELL_RUNS_MAX = 128, 4096
"""Runs by fewer threads before all are tried again; twice as many each time that they wait still,
up to the most."""


class TeamSize:
    """Threads whose cores others use, too, wait for each other: each barrier lasts until the last
    thread has its core back. As many as they come to without the waiting do as much, and leave the
    cores to the others."""

    def __init__(self, threads: int) -> None:
        assert threads > 0
        self.threads = threads
        #: of the next Run
        self.active = threads
        self._spell_runs = self._next_spell_runs = SPELL_RUNS
        self._runs = self._took_ns = self._waited_ns = 0

    def ran(self, took_ns: int, waited_ns: int) -> None:
        """A Run by the `active` threads: their time and what of that they waited, summed over
        threads."""
        if self.threads == 1:
            return
        self._runs += 1
        if self.active < self.threads:
            if self._runs == self._spell_runs:
                self._begin(self.threads)
            return
        self._took_ns += took_ns
        self._waited_ns += waited_ns
        if self._runs == WINDOW_RUNS:
            self._judge()

    # -- helpers, in the order used -------------------------------------------------------------

    def _judge(self) -> None:
        worked = 1 - self._waited_ns / max(self._took_ns, 1)
        if worked >= 1 - WAITED_MAX:
            self._next_spell_runs = SPELL_RUNS
            self._begin(self.threads)
        else:
            self._spell_runs = self._next_spell_runs
            self._next_spell_runs = min(2 * self._spell_runs, SPELL_RUNS_MAX)
            self._begin(max(1, round(self.threads * worked)))

    def _begin(self, active: int) -> None:
        self.active = active
        self._runs = self._took_ns = self._waited_ns = 0
