"""The threads that compute a span together: parked, woken for each Run, ended with the model."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from livescale.engine.base.team_size import TeamSize
from livescale.engine.kernels.span import lead, serve
from livescale.engine.kernels.team import function_address, new_semaphores, post


class SpanTeam:
    """Threads for one job. The caller of `run` is the first of them."""

    def __init__(self, job: np.ndarray, layers: np.ndarray, like: Any) -> None:
        self._job, self._layers, self._like = job, layers, like
        self._threads: list[threading.Thread] = []
        job["wait"], job["post"] = function_address("sem_wait"), function_address("sem_post")
        job["yield_core"] = function_address("sched_yield")
        job["clock"] = function_address("clock_gettime")
        self._begin(1)

    def use(self, count: int) -> None:
        """So many threads from now on."""
        if count != len(self._threads) + 1:
            self.end()
            self._begin(count)

    def run(self) -> None:
        """Carry the job out, in as many of the threads as get on with it."""
        self._job["threads"] = self._size.active
        took_ns, waited_ns = lead(self._job, self._layers, self._like)
        self._size.ran(took_ns, waited_ns)

    def end(self) -> None:
        """No thread is left but the caller."""
        self._finalizer()
        for thread in self._threads:
            thread.join()
        self._threads = []

    # -- helpers, in the order used -------------------------------------------------------------

    def _begin(self, count: int) -> None:
        self._size = TeamSize(count)
        self._job["is_over"] = 0
        semaphores = new_semaphores(count - 1), new_semaphores(count - 1)
        self._job["wake"], self._job["done"] = (each.ctypes.data for each in semaphores)
        # A model that is dropped without a word leaves no threads behind.
        self._finalizer = weakref.finalize(self, _dismiss, self._job, semaphores)
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._job, self._layers, self._like, number, semaphores),
                daemon=True,
            )
            for number in range(1, count)
        ]
        for thread in self._threads:
            thread.start()


def _serve(
    job: np.ndarray, layers: np.ndarray, like: Any, me: int, _semaphores: tuple[np.ndarray, ...]
) -> None:
    """Holds on to all that the kernel knows by its address."""
    serve(job, layers, like, me)


def _dismiss(job: np.ndarray, semaphores: tuple[np.ndarray, ...]) -> None:
    job["is_over"] = 1
    for semaphore in semaphores[0]:
        post(semaphore.ctypes.data)
