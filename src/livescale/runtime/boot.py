"""How a child process starts and ends: its boot message, its status lines, its parent's death.

A child gets one JSON line on standard input, answers with status lines on standard output, and
ends when standard input does: then its parent is gone, and nothing would stop it any more. After
the boot message an empty line on standard input asks whether the child still works; the answer is
a status line. Any other line is one of JSON, for a child that heeds its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from livescale.batching.live_batch import LiveLimits
from livescale.config import ModelConfig, PoolConfig
from livescale.control.config import ControllerConfig
from livescale.latency.models import AnyLatency
from livescale.latency.work import LinearLatency
from livescale.runtime.news import LoadProgress, News
from livescale.runtime.wire import Address, CatalogEntry, PublishedModel, UnservedModel
from livescale.topology import Device, Host
from livescale.types import Value, WorkerRef

_READ_BYTES = 1 << 16


class ControllerBoot(Value, frozen=True, tag=True):
    """What the controller process is told. `listen_fd` is a listening socket it inherits.

    `start` names the start of the pool in the run record. With a `pool.state` the controller keeps
    there what is published, under the supervisor's lock.
    """

    secret: str
    listen_fd: int
    config: ControllerConfig
    models: tuple[PublishedModel, ...]
    pool: PoolConfig
    step_gap_ns: int
    record: str | None
    start: str = ""
    unserved: tuple[UnservedModel, ...] = ()


class GatewayBoot(Value, frozen=True, tag=True):
    """What the gateway process is told. `listen_fd` is the HTTP socket it inherits, from an earlier
    life of the gateway where it `is_successor`."""

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
    admin_key_digests: tuple[str, ...] = ()
    key_weights: dict[str, int] = msgspec.field(default_factory=dict)
    page_origins: tuple[str, ...] = ()
    queue_timeout_s: float | None = None
    lost_after_ms: int = 5000
    is_successor: bool = False


class WorkerBoot(Value, frozen=True, tag=True):
    """What a worker process is told. No model: that comes with a load order. Its member is recorded
    in the directory `record_members`, if there is one.

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
    lost_after_ms: int = 5000
    stuck_after_ms: int = 60_000
    record_members: str | None = None


class AgentBoot(Value, frozen=True, tag=True):
    """What a host agent's process is told. `data_host` is the address of the host's own link,
    `touched_bytes` is how much of its memory it takes at its start; the rest when it is needed.
    Its member is recorded in the directory `record_members`, if there is one."""

    secret: str
    agent: WorkerRef
    host: Host
    controller: Address
    data_host: str
    shm_directory: str
    touched_bytes: int
    keeps_rates: bool = True
    parameter_share_percent: int = 100
    carrier: str = "auto"
    stall_ms: int = 2000
    lost_after_ms: int = 5000
    stuck_after_ms: int = 60_000
    record_members: str | None = None


class PrepareBoot(Value, frozen=True, tag=True):
    """What a process is told that prepares one model for publication, and ends then."""

    pool: PoolConfig
    model: ModelConfig


Boot = ControllerBoot | GatewayBoot | WorkerBoot | AgentBoot
AnyBoot = TypeVar("AnyBoot", ControllerBoot, GatewayBoot, WorkerBoot, AgentBoot, PrepareBoot)
# What passes the parent's question on: nothing before the process works.
_askers: list[Callable[[], None]] = []


class Status(Value, frozen=True):
    """A child's word to who started it. `is_ready` turns true once; `fatal` explains its end.
    `is_working` is the answer to its parent's question.

    A controller tells its `models` (and with them the `unserved` ones) whenever they change, for
    its next life; a process that prepares a model tells its `entry`. `news` are for people;
    `loads` are those under way, told whenever they got on (None: nothing new).
    """

    is_ready: bool = False
    is_working: bool = False
    fatal: str | None = None
    models: tuple[PublishedModel, ...] | None = None
    unserved: tuple[UnservedModel, ...] = ()
    entry: CatalogEntry | None = None
    news: tuple[News, ...] = ()
    loads: tuple[LoadProgress, ...] | None = None


def read_boot(kind: type[AnyBoot]) -> AnyBoot:
    """Read the boot line and watch standard input from then on."""
    lines = _lines_of_parent()
    boot = msgspec.json.decode(next(lines, b""), type=kind)
    threading.Thread(
        target=_end_with_parent, args=(lines,), name="parent-watch", daemon=True
    ).start()
    return boot


def answer_parent_from(
    loop: asyncio.AbstractEventLoop, is_working: Callable[[], bool] = lambda: True
) -> None:
    """The event loop answers when the parent asks whether this process works, and says nothing
    unless `is_working`."""

    def answer() -> None:
        if is_working():
            report(Status(is_working=True))

    def ask() -> None:
        # A loop that is closed is the end of the process.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(answer)

    _askers.append(ask)


def heed_parent(heed: Callable[[bytes], None]) -> None:
    """Get what the parent says after the boot message: what it has said, and all that follows.
    Called on a thread of its own; must not raise."""
    _words.heed(heed)


def report(status: Status) -> None:
    """Write a status line; a supervisor that is gone needs none."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)


class _Words:
    """What the parent said, kept until there is one who heeds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[bytes] = []
        self._heed: Callable[[bytes], None] | None = None

    def add(self, line: bytes) -> None:
        with self._lock:
            if self._heed is None:
                self._kept.append(line)
            else:
                self._heed(line)

    def heed(self, heed: Callable[[bytes], None]) -> None:
        with self._lock:
            self._heed = heed
            for line in self._kept:
                heed(line)
            self._kept.clear()


_words = _Words()


def _lines_of_parent() -> Iterator[bytes]:
    # The descriptor itself: a reader blocked in a Python file object upsets interpreter shutdown.
    begun = bytearray()
    while part := os.read(0, _READ_BYTES):
        *ended, rest = part.split(b"\n")
        for piece in ended:
            begun += piece
            yield bytes(begun)
            begun.clear()
        begun += rest


def _end_with_parent(lines: Iterator[bytes]) -> None:
    for line in lines:
        if line:
            _words.add(line)
        else:
            for ask in _askers:
                ask()
    # Not sys.exit: other threads may hold locks or compute, and there is nothing left to save.
    os._exit(0)
