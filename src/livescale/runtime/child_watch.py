"""The supervisor's eye on its children: one that does not answer is killed, to be replaced.

A process that was stopped, or whose work is stuck, does not end by itself.
When a child counts as lost is decided in `control/liveness.py`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence

from livescale.control.liveness import SilenceWatch, look_gap_ns
from livescale.runtime.pool_process import Child

_log = logging.getLogger(__name__)
_MS_NS = 1_000_000
# Until its first word: imports, memory that is touched, kernels that are compiled.
_START_NS = 600_000_000_000


async def watch_children(children: Sequence[Child], lost_after_ms: int) -> None:
    """Ask all living children again and again whether they work, for ever."""
    watch: SilenceWatch[tuple[str, int]] = SilenceWatch(lost_after_ms * _MS_NS)
    by_name = {child.name: child for child in children}
    while True:
        now_ns = time.monotonic_ns()
        watched = dict.fromkeys(watch.peers)
        for child in children:
            life = (child.name, child.life)
            if not child.is_alive:
                watch.remove(life)
                continue
            if life not in watched:
                _forget_earlier(watch, child.name)
                watch.add(life, now_ns, _START_NS)
            child.ask()
            if child.answered_ns is not None:
                watch.received(life, child.answered_ns)
        for name, _ in watch.look(now_ns):
            child = by_name[name]
            silent_s = (now_ns - (child.answered_ns or now_ns - _START_NS)) / 1e9
            _log.warning("%s is silent for %.1f s: killing it", name, silent_s)
            child.signal(signal.SIGKILL)
        await asyncio.sleep(look_gap_ns(watch.lost_after_ns) / 1e9)


def _forget_earlier(watch: SilenceWatch[tuple[str, int]], name: str) -> None:
    for peer in watch.peers:
        if peer[0] == name:
            watch.remove(peer)
