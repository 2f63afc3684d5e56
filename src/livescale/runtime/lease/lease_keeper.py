"""Keeps a lease, or waits for it: asks the store again and again, on a thread, and tells what this
process may believe. The rules are those of `control/cluster/lease.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time

from livescale.config.pool import PoolConfig
from livescale.control.cluster.lease import LeaseClaim, LeaseTerms
from livescale.runtime.lease.lease_stores import LeaseStore

_log = logging.getLogger(__name__)


def lease_clock_ns() -> int:
    """A clock that goes on while the machine is suspended, where the system has one."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def lease_terms(config: PoolConfig) -> LeaseTerms:
    """Those of the configuration."""
    return LeaseTerms(config.lease_ms * 1_000_000)


class LeaseKeeper:
    """Lives on an event loop; the store is asked on other threads, once at a time."""

    def __init__(self, claim: LeaseClaim, store: LeaseStore) -> None:
        self._claim = claim
        self._store = store
        #: why the store could not be asked last ("": it could)
        self.problem = ""

    @property
    def epoch(self) -> int:
        return self._claim.epoch

    @property
    def holder(self) -> str:
        """Who has it, as far as is known."""
        return self._claim.holder

    def holds(self) -> bool:
        """This process may act now."""
        return self._claim.holds(lease_clock_ns())

    async def acquired(self) -> None:
        """Wait until this process holds the lease."""
        while True:
            await self._turn()
            if self.holds():
                return
            await self._pause()

    async def lost(self) -> str:
        """Keep the lease for as long as that goes; why it does not go on."""
        while self.holds():
            await self._pause()
            await self._turn()
        return self.problem or "another controller has the lease"

    async def give_back(self) -> None:
        """Others need not wait for its end."""
        last = self._claim.given_back()
        if last is not None:
            try:
                await asyncio.to_thread(self._store.write, *last)
            except OSError as error:
                _log.info("The controller cannot release the lease: %s", error)

    # -- helpers --------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Until the next turn is due, or the term ends."""
        await asyncio.sleep(self._claim.terms.renewal_ns / 1e9)

    async def _turn(self) -> None:
        """Read, and write what is wanted then; or the other way round while it is held."""
        try:
            if self._claim.wanted(lease_clock_ns()) is None:
                record, version = await asyncio.to_thread(self._store.read)
                self._claim.read(record, version, lease_clock_ns())
            wanted = self._claim.wanted(lease_clock_ns())
            if wanted is not None:
                sent_ns = lease_clock_ns()
                new = await asyncio.to_thread(self._store.write, *wanted)
                if new is None:
                    self._claim.missed()
                else:
                    self._claim.written(wanted[0], new, sent_ns)
        except OSError as error:
            self._claim.missed()
            self._tell(str(error))
        else:
            self._tell("")

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning("The controller cannot reach the lease: %s", problem)
        self.problem = problem

    def __repr__(self) -> str:
        return f"<LeaseKeeper {self._claim!r} in {self._store!r}>"
