"""The supervisor of one host: the processes of its workers and its agent, whose pool may be here or
on another machine. One class for the hosts of `serve`, of a testbed, and for `join`.
"""

from __future__ import annotations

import sys

from livescale.config.pool import PoolConfig
from livescale.control.cluster.host_ledger import HostNumbers
from livescale.runtime.children.forking import ForkServer
from livescale.runtime.children.kept_children import ChildCare, KeptChildren
from livescale.runtime.children.pool_process import STATUS_BYTES_MAX, Child, child_environment
from livescale.runtime.layout.pool_layout import HostSeat
from livescale.runtime.supervisor.child_boots import MemberBoots

STOP_TIMEOUT_S = 5.0
"""What a process has to end after SIGTERM."""


class HostSupervisor:
    """Starts, watches, replaces and ends what runs on a host."""

    def __init__(
        self,
        config: PoolConfig,
        seat: HostSeat,
        numbers: HostNumbers,
        boots: MemberBoots,
        forks: ForkServer | None,
        care: ChildCare,
    ) -> None:
        """With `forks` workers are forks of that server, which is its owner's to end."""
        self.seat = seat
        self.numbers = numbers
        self._forks = forks
        children = self._agents(boots) + self._workers(boots, config.worker_python)
        self._kept = KeptChildren(config, children, care)

    @property
    def children(self) -> list[Child]:
        """The agent, if there is one, and the workers."""
        return self._kept.children

    async def start(self) -> None:
        await self._kept.start()

    def let_go(self) -> None:
        """From now on nothing is started again."""
        self._kept.let_go()

    async def end(self) -> None:
        """Everything that runs here ends; what does not is killed."""
        self._kept.let_go()
        await self._kept.end(self.children, STOP_TIMEOUT_S)
        await self._kept.close()

    async def end_forks(self) -> None:
        """End the server that workers are forks of, after them, unless another host needs it."""
        if self._forks is not None:
            self._forks.end()
            await self._forks.wait()

    def kill(self) -> None:
        """End everything at once."""
        self._kept.kill()

    def pids(self) -> dict[str, int]:
        """Process ids of the living by name: agent 0, worker 0, …"""
        return self._kept.pids()

    # -- helpers --------------------------------------------------------------------------------

    def _agents(self, boots: MemberBoots) -> list[Child]:
        if self.seat.host.memory_bytes == 0:
            return []
        number, life = self.numbers.agent, self.numbers.first_life
        boot = boots.agent(number, self.seat, life)
        return [Child(f"agent {number}", "agent", boot, (), self.seat.prefix)]

    def _workers(self, boots: MemberBoots, python: str | None) -> list[Child]:
        first, life = self.numbers.first_worker, self.numbers.first_life
        return [
            Child(
                f"worker {number}",
                "worker",
                boots.worker(number, self.seat, device, life),
                prefix=self.seat.prefix,
                forks=self._forks,
                python=python,
            )
            for number, device in enumerate(self.seat.devices, first)
        ]

    def __repr__(self) -> str:
        return f"<HostSupervisor of {self.seat.host.name}: {len(self.children)} processes>"


def fork_server(config: PoolConfig, prefix: tuple[str, ...]) -> ForkServer | None:
    """What the workers of a host are forks of, where that is of use and safe: workers of a GPU
    must not share what a driver has begun, and those that are timed import little."""
    if config.device != "cpu" or sys.platform != "linux":
        return None
    return ForkServer(
        prefix,
        child_environment(config),
        config.log_level,
        STATUS_BYTES_MAX,
        python=config.worker_python,
    )
