"""How a child process starts and ends: its boot message, its status lines, its parent's death.

A child gets one JSON line on standard input, answers with status lines on standard output, and
ends when standard input does: then its parent is gone, and nobody would stop it any more.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TypeVar

import msgspec

from livescale.batching.live_batch import LiveLimits
from livescale.config import ModelConfig, PoolConfig
from livescale.control.config import ControllerConfig
from livescale.latency.linear import LinearLatency
from livescale.latency.models import AnyLatency
from livescale.runtime.wire import Address, CatalogEntry, PublishedModel
from livescale.topology import Device, Host
from livescale.types import Value, WorkerRef


class ControllerBoot(Value, frozen=True, tag=True):
    """What the controller process is told. `listen_fd` is a listening socket it inherits."""

    secret: str
    listen_fd: int
    config: ControllerConfig
    models: tuple[PublishedModel, ...]
    pool: PoolConfig
    step_gap_ns: int
    record: str | None


class GatewayBoot(Value, frozen=True, tag=True):
    """What the gateway process is told. `listen_fd` is the HTTP socket it inherits."""

    secret: str
    gateway: str
    listen_fd: int
    controller: Address
    models: tuple[CatalogEntry, ...]
    queue_requests_max: int
    queue_prompt_tokens_max: int | None
    drain_timeout_s: float
    request_timeout_s: float | None
    receive_timeout_s: float
    stalled_client_s: float
    slo: str
    has_vllm_metrics: bool
    key_digests: tuple[str, ...]
    page_origins: tuple[str, ...] = ()
    queue_timeout_s: float | None = None


class WorkerBoot(Value, frozen=True, tag=True):
    """What a worker process is told. No model: that comes with a load order.

    `latency` is that of a timed device; others take the time that they take. `data_host` is the
    address of the device's link, `token_host` the one that gateways can reach. With
    `keeps_rates` the data plane itself keeps the device's rates.
    """

    secret: str
    worker: WorkerRef
    device: Device
    controller: Address
    data_host: str
    token_host: str
    shm_directory: str
    threads: int
    block_tokens: int
    run_tokens_max: int
    sequences_max: int
    oldest_prompt_percent: int = 50
    growth_tokens: int = 64
    weights_layout: str = "packed"
    latency: AnyLatency = LinearLatency(0, 0)
    keeps_rates: bool = True
    parameter_share_percent: int = 100
    carrier: str = "auto"
    stall_ms: int = 2000
    storage_bytes_per_s: int | None = None
    live: LiveLimits = LiveLimits()
    resident_bytes: int = 0


class AgentBoot(Value, frozen=True, tag=True):
    """What a host agent's process is told. `data_host` is the address of the host's own link."""

    secret: str
    agent: WorkerRef
    host: Host
    controller: Address
    data_host: str
    shm_directory: str
    keeps_rates: bool = True
    parameter_share_percent: int = 100
    carrier: str = "auto"
    stall_ms: int = 2000


class PrepareBoot(Value, frozen=True, tag=True):
    """What a process is told that prepares one model for publication, and ends then."""

    pool: PoolConfig
    model: ModelConfig


Boot = ControllerBoot | GatewayBoot | WorkerBoot | AgentBoot
AnyBoot = TypeVar("AnyBoot", ControllerBoot, GatewayBoot, WorkerBoot, AgentBoot, PrepareBoot)


class Status(Value, frozen=True):
    """A child's word to who started it. `is_ready` turns true once; `fatal` explains its end.

    A controller tells its `models` whenever they change, for its next life; a process that
    prepares a model tells its `entry`.
    """

    is_ready: bool = False
    fatal: str | None = None
    models: tuple[PublishedModel, ...] | None = None
    entry: CatalogEntry | None = None


def read_boot(kind: type[AnyBoot]) -> AnyBoot:
    """Read the boot line and watch standard input from then on."""
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    return boot


def report(status: Status) -> None:
    """Write a status line; a supervisor that is gone needs none."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)


def _end_with_parent() -> None:
    # The descriptor itself: a reader blocked in a Python file object upsets interpreter shutdown.
    while os.read(0, 4096):
        pass
    # Not sys.exit: other threads may hold locks or compute, and there is nothing left to save.
    os._exit(0)
