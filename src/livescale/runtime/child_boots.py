"""What each child of a pool is started with, life by life."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from livescale.config import PoolConfig
from livescale.latency.models import AnyLatency
from livescale.runtime.boot import AgentBoot, ControllerBoot, GatewayBoot, WorkerBoot
from livescale.runtime.catalog import controller_config, live_limits
from livescale.runtime.key_watch import KeyWatch
from livescale.runtime.pool_layout import PoolLayout
from livescale.runtime.restoration import Restored
from livescale.runtime.wire import Address
from livescale.types import WorkerRef, agent_ref


class ChildBoots:
    """One secret for all of them. `restored` is what a new controller or gateway
    serves: it changes while the pool runs."""

    def __init__(
        self,
        config: PoolConfig,
        layout: PoolLayout,
        restored: Restored,
        keys: KeyWatch,
        *,
        control: socket.socket,
        http: socket.socket,
        shm_directory: Path,
        latency: AnyLatency,
        page_origins: tuple[str, ...],
        start: str,
        record_members: str | None,
    ) -> None:
        """`control` and `http` listen for members and for clients. `start` names the start of the
        pool in records; those of members go to the directory `record_members`, if there is one."""
        self.secret = secrets.token_hex(16)
        self.restored = restored
        self._start = start
        self._record_members = record_members
        self._config = config
        self._layout = layout
        self._keys = keys
        self._control = control
        self._http = http
        self._shm_directory = shm_directory
        self._latency = latency
        self._page_origins = page_origins

    def controller_address(self) -> Address:
        host, port = self._control.getsockname()[:2]
        return Address(host, port)

    def controller(self, life: int) -> ControllerBoot:
        return ControllerBoot(
            secret=self.secret,
            listen_fd=self._control.fileno(),
            config=controller_config(
                self._config,
                self._layout,
                tuple(m.policy for m in self.restored.models),
                epoch=life,
            ),
            models=self.restored.models,
            unserved=self.restored.unserved,
            pool=self._config,
            step_gap_ns=self._config.step_gap_us * 1000,
            record=self._config.record,
            start=self._start,
        )

    def gateway(self, life: int) -> GatewayBoot:
        return GatewayBoot(
            secret=self.secret,
            gateway=f"g{life}",
            is_successor=life > 0,
            listen_fd=self._http.fileno(),
            controller=self.controller_address(),
            models=tuple(m.entry for m in self.restored.models if not m.is_leaving),
            queue_requests_max=self._config.queue_requests_max,
            queue_prompt_tokens_max=self._config.queue_prompt_tokens_max,
            queue_timeout_s=self._config.queue_timeout_s,
            drain_timeout_s=self._config.drain_timeout_s,
            request_timeout_s=self._config.request_timeout_s,
            receive_timeout_s=self._config.receive_timeout_s,
            stalled_client_s=self._config.stalled_client_s,
            slo=self._config.slo,
            has_vllm_metrics=self._config.metrics_compat == "vllm",
            lost_after_ms=self._config.lost_after_ms,
            key_digests=self._keys.digests.api,
            admin_key_digests=self._keys.digests.admin,
            key_weights=self._keys.digests.weights,
            page_origins=self._page_origins,
        )

    def agent(self, number: int) -> Callable[[int], AgentBoot]:
        seat = self._layout.hosts[number]

        def boot(life: int) -> AgentBoot:
            return AgentBoot(
                secret=self.secret,
                agent=agent_ref(number, life),
                host=seat.host,
                controller=self.controller_address(),
                data_host=seat.address,
                shm_directory=str(self._shm_directory),
                touched_bytes=seat.memory_touched_bytes,
                keeps_rates=not self._layout.has_links,
                parameter_share_percent=self._config.parameter_share_percent,
                carrier=self._config.carrier,
                stall_ms=self._config.stall_ms,
                lost_after_ms=self._config.lost_after_ms,
                stuck_after_ms=self._config.stuck_after_ms,
                record_members=self._record_members,
            )

        return boot

    def worker(self, number: int) -> Callable[[int], WorkerBoot]:
        host, seat = self._layout.seats[number]

        def boot(life: int) -> WorkerBoot:
            return WorkerBoot(
                secret=self.secret,
                worker=WorkerRef(number, life),
                device=seat.device,
                controller=self.controller_address(),
                data_host=seat.address,
                token_host=host.control_address,
                shm_directory=str(self._shm_directory),
                keeps_rates=not self._layout.has_links,
                threads=self._config.worker_threads,
                block_tokens=self._config.block_tokens,
                run_tokens_max=self._config.run_tokens_max,
                sequences_max=self._config.sequences_max,
                oldest_prompt_percent=self._config.oldest_prompt_percent,
                growth_tokens=self._config.growth_tokens,
                weights_layout=self._config.weights_layout,
                latency=self._latency,
                parameter_share_percent=self._config.parameter_share_percent,
                carrier=self._config.carrier,
                stall_ms=self._config.stall_ms,
                storage_bytes_per_s=host.host.storage_bytes_per_s,
                live=live_limits(self._config),
                resident_bytes=self._config.resident_bytes,
                lost_after_ms=self._config.lost_after_ms,
                stuck_after_ms=self._config.stuck_after_ms,
                record_members=self._record_members,
            )

        return boot
