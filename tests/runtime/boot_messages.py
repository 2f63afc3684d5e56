"""Boot messages of processes that a test starts without a pool."""

from __future__ import annotations

from pathlib import Path

from livescale.clusters.topology import Host
from livescale.config.pool import PoolConfig
from livescale.runtime.wire.boot import AgentBoot
from livescale.runtime.wire.protocol import Address
from livescale.values.types import agent_ref


def lonely_agent(directory: Path) -> AgentBoot:
    """A host agent whose controller is not there; its sockets are in the directory."""
    return AgentBoot(
        secret="s",
        member=agent_ref(0),
        pool=PoolConfig(),
        place=Host("h", "leaf", 1 << 20),
        touched_bytes=1 << 20,
        controller=Address("127.0.0.1", 1),
        data_host="127.0.0.1",
        shm_directory=str(directory),
    )
