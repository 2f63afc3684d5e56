"""What each child of a pool is started with, life by life."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from livescale.common.addresses import parse_address
from livescale.config.pool import PoolConfig
from livescale.control.cluster.host_ledger import HostEntry
from livescale.latency.models import AnyLatency
from livescale.runtime.layout.pool_layout import DeviceSeat, HostSeat, PoolLayout
from livescale.runtime.models.catalog import controller_config, live_limits
from livescale.runtime.supervisor.key_watch import KeyWatch
from livescale.runtime.supervisor.own_gateways import OwnGateways, with_share_of_line
from livescale.runtime.wire.boot import AgentBoot, ControllerBoot, GatewayBoot, WorkerBoot
from livescale.runtime.wire.protocol import Address, Catalog
from livescale.values.scaling_policies import CoresModel
from livescale.values.types import Manifest, WorkerRef, agent_ref


def other_heads(config: PoolConfig, own: Address) -> tuple[Address, ...]:
    """Where other controllers may act than at `own`. Raises ConfigError."""
    found = [
        Address(*parse_address(text.strip(), "heads", is_own=False))
        for text in (config.heads or "").split(",")
        if text.strip()
    ]
    return tuple(address for address in found if address != own)


@dataclass(eq=False)
class ChildBoots:
    """Of the pool's controller and gateways. `catalog` is what a new one of them serves, `hosts`
    who has joined: both change while the pool runs.

    `control` listens for members. `start` names the start of the pool in records. Gateways have
    files of theirs in `directory`.
    """

    config: PoolConfig
    layout: PoolLayout
    catalog: Catalog
    keys: KeyWatch
    control: socket.socket
    gateways: OwnGateways
    directory: Path
    page_origins: tuple[str, ...]
    start: str
    secret: str
    #: that have joined
    hosts: tuple[HostEntry, ...] = ()
    epoch_min: int = 1

    def manifests(self) -> tuple[Manifest, ...]:
        """Of what is served now."""
        return tuple(model.entry.manifest for model in self.catalog.models)

    def controller_address(self) -> Address:
        host, port = self.control.getsockname()[:2]
        return Address(host, port)

    def controller(self, life: int) -> ControllerBoot:
        policies = tuple(model.policy for model in self.catalog.models)
        config = controller_config(self.config, self.layout, policies, epoch=life)
        joined = sum(host.places for host in self.hosts if host.is_here)
        expected = config.workers_expected + joined
        return ControllerBoot(
            secret=self.secret,
            listen_fd=self.control.fileno(),
            config=msgspec.structs.replace(config, workers_expected=expected),
            pool=self.config,
            catalog=self.catalog,
            start=self.start,
            own_hosts=tuple(seat.host.name for seat in self.layout.hosts),
            hosts=self.hosts,
            epoch_min=self.epoch_min,
            has_api_keys=bool(self.keys.digests.api),
            has_admin_keys=bool(self.keys.digests.admin),
        )

    def gateway(self, number: int, life: int) -> GatewayBoot:
        name = f"g{life}" if self.gateways.count == 1 else f"g{number}.{life}"
        return GatewayBoot(
            secret=self.secret,
            # Of several heads each has gateways, and their requests have their names.
            gateway=name if self.config.lease is None else f"{self.start}{name}",
            is_successor=life > 0,
            listen_fd=self.gateways.port.fileno(number),
            controller=self.controller_address(),
            other_controllers=other_heads(self.config, self.controller_address()),
            pool=with_share_of_line(self.config, number),
            catalog=self.catalog,
            key_digests=self.keys.digests.api,
            admin_key_digests=self.keys.digests.admin,
            key_weights=self.keys.digests.weights,
            page_origins=self.page_origins,
            place=self.gateways.place(number, str(self.directory)),
        )


@dataclass(eq=False)
class MemberBoots:
    """Of the workers and the agent of a host. They find the controller at its address, and records
    of them go to the directory `record_members`, if there is one. `manifests` are of the models
    that are served when a life begins, as far as they are known here."""

    config: PoolConfig
    secret: str
    controller: Address
    shm_directory: Path
    latency: AnyLatency
    cores: CoresModel | None = None
    keeps_rates: bool = True
    record_members: str | None = None
    manifests: Callable[[], tuple[Manifest, ...]] = tuple

    def agent(self, number: int, seat: HostSeat, first_life: int) -> Callable[[int], AgentBoot]:
        return lambda life: AgentBoot(
            member=agent_ref(number, first_life + life),
            place=seat.host,
            data_host=seat.address,
            storage_bytes_per_s=seat.host.storage_bytes_per_s,
            touched_bytes=seat.memory_touched_bytes,
            **self._of_members(),
        )

    def worker(
        self, number: int, host: HostSeat, seat: DeviceSeat, first_life: int
    ) -> Callable[[int], WorkerBoot]:
        return lambda life: WorkerBoot(
            member=WorkerRef(number, first_life + life),
            place=seat.device,
            data_host=seat.address,
            storage_bytes_per_s=host.host.storage_bytes_per_s,
            token_host=host.control_address,
            latency=self.latency,
            cores=self.cores,
            live=live_limits(self.config),
            ahead=self.manifests() if self.config.device == "vllm" else (),
            **self._of_members(),
        )

    def _of_members(self) -> dict[str, Any]:
        """What all members are told alike."""
        return {
            "secret": self.secret,
            "pool": self.config,
            "controller": self.controller,
            "other_controllers": other_heads(self.config, self.controller),
            "shm_directory": str(self.shm_directory),
            "keeps_rates": self.keeps_rates,
            "record_members": self.record_members,
        }
