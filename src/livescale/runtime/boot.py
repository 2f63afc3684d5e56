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

from livescale.batching.latency import LinearLatency
from livescale.control.config import ControllerConfig
from livescale.runtime.wire import Address
from livescale.topology import Device
from livescale.types import Manifest, ModelSpec, SamplingDefaults, Value, WorkerRef


class CatalogEntry(Value, frozen=True):
    """A model of the pool, prepared once: where it lies, what it weighs, what its files hash to."""

    spec: ModelSpec
    manifest: Manifest
    directory: str
    eos_token_ids: tuple[int, ...]
    request_tokens_max: int
    sampling_defaults: SamplingDefaults = SamplingDefaults()


class ControllerBoot(Value, frozen=True, tag=True):
    """What the controller process is told. `listen_fd` is a listening socket it inherits."""

    secret: str
    listen_fd: int
    config: ControllerConfig
    models: tuple[CatalogEntry, ...]
    step_gap_ns: int
    record: str | None
    settings: dict[str, object]


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


class WorkerBoot(Value, frozen=True, tag=True):
    """What a worker process is told. No model: that comes with a load order.

    `latency` is that of a timed device; others take the time that they take.
    """

    secret: str
    worker: WorkerRef
    device: Device
    controller: Address
    threads: int
    block_tokens: int
    chunk_bytes: int
    run_tokens_max: int
    sequences_max: int
    oldest_prompt_percent: int = 50
    growth_tokens: int = 64
    weights_layout: str = "packed"
    latency: LinearLatency = LinearLatency(0, 0)


Boot = ControllerBoot | GatewayBoot | WorkerBoot
AnyBoot = TypeVar("AnyBoot", ControllerBoot, GatewayBoot, WorkerBoot)


class Status(Value, frozen=True):
    """A child's word to its supervisor. `is_ready` turns true once; `fatal` explains its end."""

    is_ready: bool = False
    fatal: str | None = None


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
