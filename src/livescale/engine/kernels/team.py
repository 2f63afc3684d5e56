"""The threads of a span: how they wait for each other and share what there is to do.

They are parked on semaphores between Runs. Inside of a Run a barrier is an atomic counter: a thread
that waits spins a little, as the others are mostly about to come, and then gives its core away
again and again, so that another process on that core does not cost a time slice per barrier."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from livescale.engine.kernels.compiled import (
    call_with_address,
    clock_ns,
    compiled,
    fetch_add,
    load,
)

SPINS = 2000
"""Looks at the counter, some microseconds, before a waiting thread gives its core away."""

SEMAPHORE_BYTES = 64
"""More than any C library's `sem_t`, and a cache line."""

_C = ctypes.CDLL(None, use_errno=True)


def function_address(name: str) -> int:
    """Of the C library."""
    return ctypes.cast(_C[name], ctypes.c_void_p).value or 0


def new_semaphores(count: int) -> np.ndarray:
    """(count, bytes) semaphores at 0, each on a cache line of its own."""
    memory = np.zeros((count, SEMAPHORE_BYTES), np.uint8)
    for semaphore in memory:
        assert _C.sem_init(ctypes.c_void_p(semaphore.ctypes.data), 0, 0) == 0, "sem_init"
    return memory


def post(address: int) -> None:
    """One thread that waits at the semaphore goes on."""
    _C.sem_post(ctypes.c_void_p(address))


@compiled()
def wake_all(job: Any) -> None:
    """The threads other than the first begin."""
    for number in range(job[0].threads - 1):
        call_with_address(job[0].post, job[0].wake + SEMAPHORE_BYTES * number)


@compiled()
def wait_for_all(job: Any) -> None:
    """Until the threads other than the first have ended."""
    for number in range(job[0].threads - 1):
        wait_for(job, job[0].done + SEMAPHORE_BYTES * number)


@compiled()
def wait_for(job: Any, semaphore: Any) -> None:
    """Until the semaphore is posted to."""
    while call_with_address(job[0].wait, semaphore) != 0:
        pass


@compiled()
def take(job: Any, phase: Any) -> Any:
    """The number of the next piece of this phase that no thread has taken."""
    return fetch_add(job[0].counters + phase * 8, 1)


@compiled()
def meet(job: Any, phase: Any) -> Any:
    """Wait until all threads have come to the end of the phase. Returns the next one's number."""
    if job[0].threads > 1:
        target = (phase + 1) * job[0].threads
        if fetch_add(job[0].barrier, 1) + 1 < target:
            _wait(job, target)
    return phase + 1


# -- helpers, in the order used -----------------------------------------------------------------


@compiled()
def _wait(job: Any, target: Any) -> None:
    spins, begun_ns = 0, np.int64(0)
    while load(job[0].barrier) < target:
        spins += 1
        if spins == SPINS:
            begun_ns = clock_ns(job[0].clock)
        if spins > SPINS:
            call_with_address(job[0].yield_core, 0)
    if begun_ns:
        fetch_add(job[0].waited, clock_ns(job[0].clock) - begun_ns)
