"""The cores of this machine that a CPU worker computes with: threads, and where these may run."""

from __future__ import annotations

import os
import threading

import torch


class ComputeCores:
    """Of one process. It begins with what torch is set to, on any CPU that it may use.

    With another number its computing threads are bound to as many CPUs, which begin at a place that
    its `number` says: workers with as many cores each lie apart. With the first number again they
    are as free as they were.
    """

    def __init__(self, number: int) -> None:
        self.own = self.count = torch.get_num_threads()
        self._number = number
        self._cpus = sorted(os.sched_getaffinity(0))
        self._has_changed = False
        #: what each thread was set to: torch and the kernel keep both by thread
        self._set = threading.local()

    def use(self, count: int) -> int:
        """From the next Run on. Returns how many there will be: no more than this process may use,
        or began with."""
        self.count = max(1, min(count, max(len(self._cpus), self.own)))
        self._has_changed = self._has_changed or self.count != self.own
        return self.count

    def apply(self) -> None:
        """Before a Run, on the thread that computes it."""
        if not self._has_changed or getattr(self._set, "count", None) == self.count:
            return
        # First: threads of the pool that begin later inherit where this one may run.
        os.sched_setaffinity(0, self.cpus())
        torch.set_num_threads(self.count)
        self._set.count = self.count

    def cpus(self) -> list[int]:
        """Where the threads may run."""
        if self.count == self.own:
            return self._cpus
        first = self._number * self.count
        return [self._cpus[(first + n) % len(self._cpus)] for n in range(self.count)]
