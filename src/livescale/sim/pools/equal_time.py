"""A fixed pool of the same device time as a pool that scales: what scaling has to beat."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from livescale.sim.pools.runs import PoolRun
from livescale.sim.pools.systems import System


def play_equal(
    system: System,
    compared: PoolRun,
    devices: int,
    step: int,
    play: Callable[[System], PoolRun],
) -> tuple[System, PoolRun]:
    """The smallest fixed pool, of at most `devices`, that takes no less device time than the
    `compared` run, and its run; the whole pool, if that is what it takes.

    `system` has the fields of the fixed pool but its size, `play` runs one; pools grow by `step`
    devices (those of an instance). Pools are tried from the mean of the devices that were held on:
    a fixed pool whose load is over sooner may need an instance more. Raises what `play` raises.
    """
    needed_ns = compared.device_ns()
    span_ns = max(compared.ended_ns - compared.started_ns, 1)
    count = max(-(-needed_ns // (span_ns * step)) * step, step)
    while True:
        count = min(count, devices)
        sized = msgspec.structs.replace(
            system,
            sentence=f"{system.sentence}: {count} devices",
            fixed_like=None,
            fixed_devices=count,
        )
        run = play(sized)
        if run.device_ns() >= needed_ns or count >= devices:
            return sized, run
        count += step
