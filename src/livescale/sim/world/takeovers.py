"""A second controller takes over while the first one lives on and does not know it.

Its lease has ended, by its own clock or not, and its link may be cut: each member and each gateway
reaches both of them, one of them, or none for a while. Half of the first ones never receive that
they are over: they act until the end of their lease.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from livescale.sim.base.clock import Clock
from livescale.sim.world.life import ControllerLife, Peer


class Takeover:
    """From `older` to a newer life. Every cut ends after `longest_ns`; by then the older life has
    ended, if only by its lease."""

    def __init__(self, clock: Clock, older: ControllerLife, longest_ns: int, choice: int) -> None:
        self._clock = clock
        self.older = older
        self._longest_ns = longest_ns
        self._rng = random.Random(f"takeover {choice}")
        older.is_deaf = self._rng.random() < 0.5
        clock.after(longest_ns, lambda: older.end(clock.now_ns))

    def begin(self, peer: Peer, meet: Callable[[], None]) -> None:
        """The peer is to `meet` the newer life. Half of them reach it soon, and half are cut off
        from the older one for a while."""
        rng, older = self._rng, self.older
        soon_ns = max(self._longest_ns // 20, 1)
        self._clock.after(rng.randint(1, rng.choice([soon_ns, self._longest_ns])), meet)
        cut_ns = rng.choice([0, rng.randint(1, self._longest_ns)])
        if cut_ns:
            older.hold(peer)
            self._clock.after(cut_ns, lambda: older.go_on(peer))
