"""The supervisor: owns every process of a pool and does nothing else.

It keeps the listening sockets, so that a controller or gateway that dies is replaced behind an
address that never closes, and it gives a replaced process its next incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from livescale.config import PoolConfig
from livescale.gateway.keys import read_key_digests
from livescale.gateway.pages import page_origins
from livescale.runtime.boot import (
    AgentBoot,
    ControllerBoot,
    GatewayBoot,
    Status,
    WorkerBoot,
)
from livescale.runtime.catalog import (
    controller_config,
    latency,
    live_limits,
    model_policy,
    prepare_models,
    with_host_memory,
)
from livescale.runtime.examination import ExamineBoot, examine, examine_inside
from livescale.runtime.listening import listen, listen_inside
from livescale.runtime.lives import Child
from livescale.runtime.site import Site, local_site, site_of
from livescale.runtime.wire import Address, CatalogEntry, HeldCopy, PublishedModel
from livescale.settings import ConfigError
from livescale.topology_files import read_topology
from livescale.types import WorkerRef, agent_ref

_log = logging.getLogger(__name__)
# After SIGTERM; the gateway gets its drain timeout on top.
_STOP_TIMEOUT_S = 5.0


class PoolFailed(Exception):
    """The pool cannot start or go on; the message says which process and why."""


class Pool:
    """A pool of warm workers, its controller and its gateway. Use as an async context."""

    def __init__(
        self,
        config: PoolConfig,
        environ: Mapping[str, str] | None = None,
        site: Site | None = None,
    ) -> None:
        """Prepare models and sockets. Raises ModelError or ConfigError; no process is started.

        API keys are those of `config.api_key_file` and of the variables in `environ`. `site` says
        where the processes run; without it that follows from the configuration.
        """
        site = site if site is not None else configured_site(config)
        if len(site.seats) != config.workers:
            raise ConfigError(
                f"workers is {config.workers}, but there are {len(site.seats)} devices"
            )
        self.config = config
        self._page_origins = page_origins(config.cors_origins)
        self._key_digests = read_key_digests(config.api_key_file, environ or {})
        self._latency = latency(config)
        self.models = prepare_models(config)
        self.site = with_host_memory(site, config, self.models)
        #: as the controller last told them
        self._published = tuple(
            PublishedModel(entry, model_policy(config, model, entry))
            for model, entry in zip(config.models, self.models, strict=True)
        )
        controller_config(config, self.site, (), 0)
        _check_record(config.record)
        self._http = listen(config.host, config.port)
        self._control = listen_inside(site.control_prefix, site.control_address)
        self._shm = tempfile.TemporaryDirectory(prefix="livescale-", ignore_cleanup_errors=True)
        self._secret = secrets.token_hex(16)
        self._failure: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._children = self._all_children()

    def _all_children(self) -> list[Child]:
        prefix = self.site.control_prefix
        children = [
            Child(
                *("controller", "controller", self._controller_boot, (self._control.fileno(),)),
                *(prefix, self._heed_controller),
            ),
            Child("gateway", "gateway", self._gateway_boot, (self._http.fileno(),), prefix),
        ]
        children += [
            Child(f"agent {n}", "agent", self._agent_boot(n), (), seat.prefix)
            for n, seat in self.site.agents
        ]
        children += [
            Child(f"worker {n}", "worker", self._worker_boot(n), (), host.prefix)
            for n, (host, _) in enumerate(self.site.seats)
        ]
        return children

    def _heed_controller(self, status: Status) -> None:
        if status.models is not None:
            self._published = status.models

    @property
    def base_url(self) -> str:
        """Where the OpenAI API is, without /v1."""
        host, port = self._http.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def pids(self) -> dict[str, int]:
        """Process ids of the living children by name: controller, gateway, agent 0, worker 0, …"""
        return {
            child.name: child.process.pid
            for child in self._children
            if child.process is not None and child.process.returncode is None
        }

    async def examine(self) -> dict[WorkerRef, tuple[HeldCopy, ...]]:
        """The checksums of what every member's memory holds. Raises ExaminationError."""
        boot = ExamineBoot(self._secret, self._controller_address())
        if not self.site.control_prefix:
            return await examine(boot)
        return await asyncio.to_thread(examine_inside, self.site.control_prefix, boot)

    async def __aenter__(self) -> Pool:
        self._failure = asyncio.get_running_loop().create_future()
        try:
            for child in self._children:
                await child.start(self.config)
                self._tasks.append(asyncio.create_task(self._keep_alive(child)))
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Return when every model is served. Raises PoolFailed."""
        gateway = next(child for child in self._children if child.kind == "gateway")
        await self.or_failure(gateway.is_ready.wait())

    async def or_failure(self, awaitable: object) -> None:
        """Wait for the awaitable, but no longer than the pool lives. Raises PoolFailed."""
        assert self._failure is not None
        task = asyncio.ensure_future(awaitable)  # type: ignore[call-overload]
        done, _ = await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        if self._failure in done:
            task.cancel()
            self._failure.result()
        await task

    async def stop(self) -> None:
        """Drain: no new requests, running ones finish within the timeout, then everybody ends."""
        self._is_stopping = True
        gateways = [child for child in self._children if child.kind == "gateway"]
        others = [child for child in self._children if child.kind != "gateway"]
        # The pool's own copy must close too, or clients could still connect and would hang.
        self._http.close()
        await self._end(gateways, self.config.drain_timeout_s + 2 * _STOP_TIMEOUT_S)
        await self._end(others, _STOP_TIMEOUT_S)
        self._control.close()
        self._shm.cleanup()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None and not self._failure.cancel():
            self._failure.exception()  # whoever waited was told; asyncio must not tell again

    async def kill(self) -> None:
        """End every process at once."""
        self._is_stopping = True
        for child in self._children:
            child.signal(signal.SIGKILL)

    # -- helpers --------------------------------------------------------------------------------

    async def _keep_alive(self, child: Child) -> None:
        while True:
            await child.watch()
            if self._is_stopping:
                return
            assert child.process is not None
            assert self._failure is not None
            _log.warning("%s ended with status %s", child.name, child.process.returncode)
            reason = child.give_up_reason()
            if reason is not None:
                if not self._failure.done():
                    self._failure.set_exception(PoolFailed(reason))
                return
            await asyncio.sleep(child.pause_s())
            if self._is_stopping:
                return
            await child.start(self.config)

    async def _end(self, children: list[Child], timeout_s: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        waits = [child.process.wait() for child in children if child.process is not None]
        try:
            await asyncio.wait_for(asyncio.gather(*waits), timeout_s)
        except TimeoutError:
            for child in children:
                if child.process is not None and child.process.returncode is None:
                    _log.warning("%s does not end: killing it", child.name)
                    child.signal(signal.SIGKILL)

    def _controller_boot(self, life: int) -> ControllerBoot:
        return ControllerBoot(
            secret=self._secret,
            listen_fd=self._control.fileno(),
            config=controller_config(
                self.config, self.site, tuple(m.policy for m in self._published), epoch=life
            ),
            models=self._published,
            pool=self.config,
            step_gap_ns=self.config.step_gap_us * 1000,
            record=self.config.record,
        )

    def _gateway_boot(self, life: int) -> GatewayBoot:
        return GatewayBoot(
            secret=self._secret,
            gateway=f"g{life}",
            listen_fd=self._http.fileno(),
            controller=self._controller_address(),
            models=tuple(m.entry for m in self._published if not m.is_leaving),
            queue_requests_max=self.config.queue_requests_max,
            queue_prompt_tokens_max=self.config.queue_prompt_tokens_max,
            queue_timeout_s=self.config.queue_timeout_s,
            drain_timeout_s=self.config.drain_timeout_s,
            request_timeout_s=self.config.request_timeout_s,
            receive_timeout_s=self.config.receive_timeout_s,
            stalled_client_s=self.config.stalled_client_s,
            slo=self.config.slo,
            has_vllm_metrics=self.config.metrics_compat == "vllm",
            key_digests=self._key_digests,
            page_origins=self._page_origins,
        )

    def _agent_boot(self, number: int) -> Callable[[int], AgentBoot]:
        seat = self.site.hosts[number]

        def boot(life: int) -> AgentBoot:
            return AgentBoot(
                secret=self._secret,
                agent=agent_ref(number, life),
                host=seat.host,
                controller=self._controller_address(),
                data_host=seat.address,
                shm_directory=self._shm.name,
                keeps_rates=not self.site.has_links,
                parameter_share_percent=self.config.parameter_share_percent,
                carrier=self.config.carrier,
                stall_ms=self.config.stall_ms,
            )

        return boot

    def _worker_boot(self, number: int) -> Callable[[int], WorkerBoot]:
        host, seat = self.site.seats[number]

        def boot(life: int) -> WorkerBoot:
            return WorkerBoot(
                secret=self._secret,
                worker=WorkerRef(number, life),
                device=seat.device,
                controller=self._controller_address(),
                data_host=seat.address,
                token_host=host.control_address,
                shm_directory=self._shm.name,
                keeps_rates=not self.site.has_links,
                threads=self.config.worker_threads,
                block_tokens=self.config.block_tokens,
                run_tokens_max=self.config.run_tokens_max,
                sequences_max=self.config.sequences_max,
                oldest_prompt_percent=self.config.oldest_prompt_percent,
                growth_tokens=self.config.growth_tokens,
                weights_layout=self.config.weights_layout,
                latency=self._latency,
                parameter_share_percent=self.config.parameter_share_percent,
                carrier=self.config.carrier,
                stall_ms=self.config.stall_ms,
                storage_bytes_per_s=host.host.storage_bytes_per_s,
                live=live_limits(self.config),
                resident_bytes=self.config.resident_bytes,
            )

        return boot

    def _controller_address(self) -> Address:
        host, port = self._control.getsockname()[:2]
        return Address(host, port)


def describe(models: tuple[CatalogEntry, ...]) -> list[str]:
    """One line per model for people."""
    return [
        f"{m.spec.name}: {m.spec.size_bytes / 1e6:.1f} MB, {m.spec.layers} layers,"
        f" {m.manifest.dtype}, up to {m.request_tokens_max} tokens per request"
        for m in models
    ]


def configured_site(config: PoolConfig) -> Site:
    """Where the processes run by the configuration alone: on this machine. Raises ConfigError."""
    if config.topology is None:
        return local_site(config)
    return site_of(read_topology(Path(config.topology)).topology, config)


def _check_record(record: str | None) -> None:
    """Begin a new record file, now: a path that cannot be written is an error before the start."""
    if record is None:
        return
    try:
        Path(record).parent.mkdir(parents=True, exist_ok=True)
        Path(record).write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"record {record}: cannot be written: {error.strerror}") from error
