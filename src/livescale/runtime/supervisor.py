"""The supervisor: owns every process of a pool and does nothing else.

It keeps the listening sockets, so that a controller or gateway that dies is replaced behind an
address that never closes, and it gives a replaced process its next incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from livescale.config import PoolConfig
from livescale.gateway.keys import KEY_VARIABLES, read_key_digests
from livescale.runtime.boot import (
    Boot,
    CatalogEntry,
    ControllerBoot,
    GatewayBoot,
    Status,
    WorkerBoot,
)
from livescale.runtime.catalog import controller_config, device, latency, prepare_models
from livescale.runtime.wire import Address
from livescale.settings import ConfigError
from livescale.types import WorkerRef

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
# A process that dies so often before it is ready will not get better by itself.
_FAILED_STARTS_MAX = 3
# One that was ready is always replaced, but the sooner it dies again and again, the later.
_SHORT_LIFE_S = 10.0
_RESTART_PAUSE_S = (0.1, 5.0)
# After SIGTERM; the gateway gets its drain timeout on top.
_STOP_TIMEOUT_S = 5.0
_STATUS_BYTES_MAX = 1 << 20


class PoolFailed(Exception):
    """The pool cannot start or go on; the message says which process and why."""


class _Child:
    """One process and its successors. `boot` builds the boot message of the n-th life."""

    def __init__(self, name: str, kind: str, boot: Callable[[int], Boot], fds: tuple[int, ...]):
        self.name = name
        self.kind = kind
        self.life = -1
        self.is_ready = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._boot = boot
        self._fds = fds
        self._failed_starts = 0
        self._short_lives = 0
        self._fatal: str | None = None

    async def start(self, config: PoolConfig) -> None:
        self.life += 1
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "livescale.runtime.child",
            self.kind,
            config.log_level,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._fds,
            # Ctrl-C is the supervisor's alone: it stops its children in order.
            start_new_session=True,
            env=_child_environment(config),
            limit=_STATUS_BYTES_MAX,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self._boot(self.life)) + b"\n")

    async def watch(self) -> None:
        """Read status lines until the process is gone."""
        assert self.process is not None
        assert self.process.stdout is not None
        ready_at: float | None = None
        async for text in self.process.stdout:
            with contextlib.suppress(msgspec.MsgspecError):
                status = msgspec.json.decode(text, type=Status)
                self._fatal = status.fatal or self._fatal
                if status.is_ready:
                    ready_at = time.monotonic()
                    self.is_ready.set()
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._failed_starts = self._failed_starts + 1 if ready_at is None else 0
        is_short = ready_at is None or time.monotonic() - ready_at < _SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if is_short else 0
        self.is_ready.clear()

    def give_up_reason(self) -> str | None:
        """Why starting the process again makes no sense (None: it does)."""
        if self._failed_starts < _FAILED_STARTS_MAX:
            return None
        assert self.process is not None
        return (
            f"{self.name} died {self._failed_starts} times in a row before it was ready"
            f" (exit status {self.process.returncode}): {self._fatal or 'see its log'}"
        )

    def pause_s(self) -> float:
        """How long to wait before the next life: twice as long after each short one."""
        least, most = _RESTART_PAUSE_S
        return float(min(least * 2 ** max(self._short_lives - 1, 0), most))

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Pool:
    """A pool of warm workers, its controller and its gateway. Use as an async context."""

    def __init__(self, config: PoolConfig, environ: Mapping[str, str] | None = None) -> None:
        """Prepare models and sockets. Raises ModelError or ConfigError; no process is started.

        API keys are those of `config.api_key_file` and of the variables in `environ`.
        """
        self.config = config
        self._key_digests = read_key_digests(config.api_key_file, environ or {})
        self.models = prepare_models(config)
        _check_record(config.record)
        self._http = _listen(config.host, config.port)
        self._control = _listen(_HOST, 0)
        self._secret = secrets.token_hex(16)
        self._failure: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._children = [
            _Child("controller", "controller", self._controller_boot, (self._control.fileno(),)),
            _Child("gateway", "gateway", self._gateway_boot, (self._http.fileno(),)),
        ]
        self._children += [
            _Child(f"worker {n}", "worker", self._worker_boot(n), ()) for n in range(config.workers)
        ]

    @property
    def base_url(self) -> str:
        """Where the OpenAI API is, without /v1."""
        host, port = self._http.getsockname()[:2]
        return f"http://{host}:{port}"

    def pids(self) -> dict[str, int]:
        """Process ids of the living children by name: controller, gateway, worker 0, …"""
        return {
            child.name: child.process.pid
            for child in self._children
            if child.process is not None and child.process.returncode is None
        }

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
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None and not self._failure.cancel():
            self._failure.exception()  # whoever waited was told; asyncio must not tell again

    async def kill(self) -> None:
        """End every process at once."""
        self._is_stopping = True
        for child in self._children:
            child.signal(signal.SIGKILL)

    # -- helpers --------------------------------------------------------------------------------

    async def _keep_alive(self, child: _Child) -> None:
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

    async def _end(self, children: list[_Child], timeout_s: float) -> None:
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
            config=controller_config(self.config, self.models, epoch=life),
            models=self.models,
            step_gap_ns=self.config.step_gap_us * 1000,
            record=self.config.record,
            settings=_settings(self.config),
        )

    def _gateway_boot(self, life: int) -> GatewayBoot:
        return GatewayBoot(
            secret=self._secret,
            gateway=f"g{life}",
            listen_fd=self._http.fileno(),
            controller=self._controller_address(),
            models=self.models,
            queue_requests_max=self.config.queue_requests_max,
            queue_prompt_tokens_max=self.config.queue_prompt_tokens_max,
            drain_timeout_s=self.config.drain_timeout_s,
            request_timeout_s=self.config.request_timeout_s,
            receive_timeout_s=self.config.receive_timeout_s,
            stalled_client_s=self.config.stalled_client_s,
            slo=self.config.slo,
            has_vllm_metrics=self.config.metrics_compat == "vllm",
            key_digests=self._key_digests,
        )

    def _worker_boot(self, number: int) -> Callable[[int], WorkerBoot]:
        def boot(life: int) -> WorkerBoot:
            return WorkerBoot(
                secret=self._secret,
                worker=WorkerRef(number, life),
                device=device(self.config),
                controller=self._controller_address(),
                threads=self.config.worker_threads,
                block_tokens=self.config.block_tokens,
                chunk_bytes=self.config.chunk_bytes,
                run_tokens_max=self.config.run_tokens_max,
                sequences_max=self.config.sequences_max,
                oldest_prompt_percent=self.config.oldest_prompt_percent,
                growth_tokens=self.config.growth_tokens,
                weights_layout=self.config.weights_layout,
                latency=latency(self.config),
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


def _settings(config: PoolConfig) -> dict[str, object]:
    settings: dict[str, object] = msgspec.to_builtins(config)
    return settings


def _child_environment(config: PoolConfig) -> dict[str, str]:
    threads = str(config.worker_threads)
    inherited = {name: text for name, text in os.environ.items() if name not in KEY_VARIABLES}
    return {
        **inherited,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Models come from directories only; nothing may try to reach a hub.
        "HF_HUB_OFFLINE": "1",
    }


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError when the address cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: choose another with --port (0: any free port)"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    return listener


def _check_record(record: str | None) -> None:
    """Begin a new record file, now: a path that cannot be written is an error before the start."""
    if record is None:
        return
    try:
        Path(record).parent.mkdir(parents=True, exist_ok=True)
        Path(record).write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"record {record}: cannot be written: {error.strerror}") from error
