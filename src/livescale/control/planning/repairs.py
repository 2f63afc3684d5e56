"""Failed feeds replaced: the orders that give receivers another holder for what they miss.

Whom to ask instead is worked out in `multicast/repair`; here that is asked for every open load and
becomes orders.
"""

from __future__ import annotations

from livescale.clusters.topology import Topology
from livescale.control.multicast.repair import Ways, repair
from livescale.control.planning.loads import Loads, OpenLoad
from livescale.control.state.pool import ParameterPool
from livescale.messages.commands import AmendHolding
from livescale.values.chunks import Feed, senders
from livescale.values.types import WorkerRef


def repair_loads(
    loads: Loads, pool: ParameterPool, topology: Topology, now_ns: int
) -> list[AmendHolding]:
    """Amendments for every open load with failed feeds.

    What was lost behind a member of a chain is fed by that member's own upstream, or by a holder of
    the model; storage comes last. A sender that failed a load once is not asked by it again.
    """
    commands = []
    for load in [load for load in loads.open.values() if load.failed]:
        feeds = _feeds(load, loads, pool, topology)
        loads.amend(load, feeds, now_ns)
        commands.append(AmendHolding(load.id, feeds))
    loads.repaired()
    return commands


def _feeds(
    load: OpenLoad, loads: Loads, pool: ParameterPool, topology: Topology
) -> tuple[Feed, ...]:
    feeds_of = loads.beside(load)
    holders = [holding.member for holding in pool.whole(load.model, load.rank)]
    known = {upstream.worker: None for feeds in feeds_of.values() for upstream in senders(feeds)}
    known |= dict.fromkeys([*holders, *feeds_of])
    readers: dict[WorkerRef, int] = {worker: pool.reads.count(worker) for worker in known}
    ways = Ways(topology, holders, readers, has_storage=True, avoided=load.shunned)
    for lost in sorted(load.failed):
        feeds_of |= repair(feeds_of, lost, [load.receiver], ways)
    return feeds_of[load.receiver]
