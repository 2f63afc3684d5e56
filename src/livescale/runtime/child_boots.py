"""What each child of a pool is started with, life by life."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from livescale.config.pool import PoolConfig
from livescale.latency.models import AnyLatency
from livescale.runtime.boot import AgentBoot, ControllerBoot, GatewayBoot, WorkerBoot
from livescale.runtime.catalog import controller_config, live_limits
from livescale.runtime.key_watch import KeyWatch
from livescale.runtime.pool_layout import PoolLayout
from livescale.runtime.protocol import Address, Catalog
from livescale.types import WorkerRef, agent_ref


@dataclass(eq=False)
class ChildBoots:
    """One secret for all of them. `catalog` is what a new controller or gateway serves: it changes
    while the pool runs.

    `control` and `http` listen for members and for clients. `start` names the start of the pool in
    records; those of members go to the directory `record_members`, if there is one.
    """

    config: PoolConfig
    layout: PoolLayout
    catalog: Catalog
    keys: KeyWatch
    control: socket.socket
    http: socket.socket
    shm_directory: Path
    latency: AnyLatency
    page_origins: tuple[str, ...]
    start: str
    record_members: str | None
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    def controller_address(self) -> Address:
        host, port = self.control.getsockname()[:2]
        return Address(host, port)

    def controller(self, life: int) -> ControllerBoot:
        policies = tuple(model.policy for model in self.catalog.models)
        return ControllerBoot(
            secret=self.secret,
            listen_fd=self.control.fileno(),
            config=controller_config(self.config, self.layout, policies, epoch=life),
            pool=self.config,
            catalog=self.catalog,
            start=self.start,
        )

    def gateway(self, life: int) -> GatewayBoot:
        return GatewayBoot(
            secret=self.secret,
            gateway=f"g{life}",
            is_successor=life > 0,
            listen_fd=self.http.fileno(),
            controller=self.controller_address(),
            pool=self.config,
            catalog=self.catalog,
            key_digests=self.keys.digests.api,
            admin_key_digests=self.keys.digests.admin,
            key_weights=self.keys.digests.weights,
            page_origins=self.page_origins,
        )

    def agent(self, number: int) -> Callable[[int], AgentBoot]:
        seat = self.layout.hosts[number]
        return lambda life: AgentBoot(
            member=agent_ref(number, life),
            place=seat.host,
            data_host=seat.address,
            storage_bytes_per_s=seat.host.storage_bytes_per_s,
            touched_bytes=seat.memory_touched_bytes,
            **self._of_members(),
        )

    def worker(self, number: int) -> Callable[[int], WorkerBoot]:
        host, seat = self.layout.seats[number]
        return lambda life: WorkerBoot(
            member=WorkerRef(number, life),
            place=seat.device,
            data_host=seat.address,
            storage_bytes_per_s=host.host.storage_bytes_per_s,
            token_host=host.control_address,
            latency=self.latency,
            live=live_limits(self.config),
            **self._of_members(),
        )

    def _of_members(self) -> dict[str, Any]:
        """What all members are told alike."""
        return {
            "secret": self.secret,
            "pool": self.config,
            "controller": self.controller_address(),
            "shm_directory": str(self.shm_directory),
            "keeps_rates": not self.layout.has_links,
            "record_members": self.record_members,
        }
