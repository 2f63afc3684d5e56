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
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from livescale.batching.live.live_batch import LiveLimits
from livescale.clusters.topology import Device, Host
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.control.cluster.host_ledger import HostEntry
from livescale.control.cluster.wanted_hosts import PoolNeed
from livescale.control.state.config import ControllerConfig
from livescale.latency.models import AnyLatency
from livescale.latency.work import LinearLatency
from livescale.runtime.wire.news import LoadProgress, News
from livescale.runtime.wire.protocol import Address, Catalog, CatalogEntry
from livescale.values.scaling_policies import CoresModel
from livescale.values.types import Manifest, Value, WorkerRef

_READ_BYTES = 1 << 16


class ControllerBoot(Value, frozen=True, tag=True):
    """What the controller process is told. `listen_fd` is a listening socket it inherits. While it
    waits for the lease, later catalogs follow.

    `start` names the start of the pool in the run record. With a `pool.state` the controller keeps
    there what is published, under the supervisor's lock. `own_hosts` are the names of the pool's
    own hosts; `hosts` have joined an earlier life. Gateways that join need keys where the head's
    has some. With a lease its epoch is `epoch_min` at least.
    """

    secret: str
    listen_fd: int
    config: ControllerConfig
    pool: PoolConfig
    catalog: Catalog
    start: str = ""
    own_hosts: tuple[str, ...] = ()
    hosts: tuple[HostEntry, ...] = ()
    epoch_min: int = 1
    has_api_keys: bool = False
    has_admin_keys: bool = False


class GatewayPlace(Value, frozen=True):
    """Of a gateway among the `count` ones behind one port, which keep their counts in
    `directory`."""

    directory: str
    number: int
    count: int


class GatewayBoot(Value, frozen=True, tag=True):
    """What the gateway process is told. `listen_fd` is the HTTP socket it inherits, from an earlier
    life of the gateway where it `is_successor`: clients wait there until the pool is known. Where
    the models' directories are on another machine, the files that it needs of them come into
    `files_directory`. One that is not alone behind its port has a `place`."""

    secret: str
    gateway: str
    listen_fd: int
    controller: Address
    pool: PoolConfig
    catalog: Catalog
    key_digests: tuple[str, ...]
    admin_key_digests: tuple[str, ...] = ()
    key_weights: dict[str, int] = msgspec.field(default_factory=dict)
    page_origins: tuple[str, ...] = ()
    is_successor: bool = False
    other_controllers: tuple[Address, ...] = ()
    files_directory: str | None = None
    place: GatewayPlace | None = None


class _MemberBoot(Value, frozen=True, kw_only=True):
    """What the processes of all members are told. No model: that comes with an order.

    Which of `controller` and `other_controllers` acts they say themselves.
    `data_host` is the address of the link of the member's `place`, whose rates the data plane
    itself keeps if it `keeps_rates`. The member is recorded in the directory `record_members`, if
    there is one.
    """

    secret: str
    member: WorkerRef
    pool: PoolConfig
    controller: Address
    other_controllers: tuple[Address, ...] = ()
    data_host: str
    shm_directory: str
    storage_bytes_per_s: int | None = None
    keeps_rates: bool = True
    record_members: str | None = None


class WorkerBoot(_MemberBoot, frozen=True, tag=True, kw_only=True):
    """What a worker's process is told besides. `latency` is that of a timed device with one core,
    and `cores` what more do for it (None: nothing); others take the time that they take. Gateways
    reach the worker at the address `token_host`. Models of these manifests may come: an engine that
    takes long to build is built `ahead`."""

    place: Device
    token_host: str
    latency: AnyLatency = LinearLatency(0, 0)
    cores: CoresModel | None = None
    live: LiveLimits = LiveLimits()
    ahead: tuple[Manifest, ...] = ()


class AgentBoot(_MemberBoot, frozen=True, tag=True, kw_only=True):
    """What a host agent's process is told besides. It takes `touched_bytes` of its host's memory at
    its start; the rest when it is needed."""

    place: Host
    touched_bytes: int


class PrepareBoot(Value, frozen=True, tag=True):
    """What a process is told that prepares one model for publication, and ends then."""

    pool: PoolConfig
    model: ModelConfig


class PoolEnds(Value, frozen=True, tag=True):
    """A controller is told that there will be no other life of it. (SIGTERM alone may come from
    outside: the next life takes over.)"""


class PoolDrains(Value, frozen=True, tag=True):
    """A controller is told that the pool is about to end: gateways on other machines take no new
    requests from now on, and let running ones finish."""


Boot = ControllerBoot | GatewayBoot | WorkerBoot | AgentBoot
AnyBoot = TypeVar("AnyBoot", ControllerBoot, GatewayBoot, WorkerBoot, AgentBoot, PrepareBoot)
# What passes the parent's question on: nothing before the process works.
_askers: list[Callable[[], None]] = []
# What the parent sent, kept until a reader is there.
_words: queue.SimpleQueue[bytes] = queue.SimpleQueue()


class Status(Value, frozen=True):
    """A child's word to who started it. `is_ready` turns true once; `fatal` explains its end.
    `is_working` is the answer to its parent's question.

    A controller tells its `catalog`, and the `hosts` that joined, whenever these change, and a
    `later_epoch` than its own of which it was told, for its next life; with a lease, that it
    `is_acting` from now on. Of several heads each has a gateway that tells the `catalog` of the
    controller which acts. A process that prepares a model tells its `entry`. `news` are for people;
    `loads` are those under way, told whenever they got on, the `need` of workers when it changed,
    and how many `gateways` of other machines are there (None: nothing new). A gateway tells whether
    it `is_accepting` connections from now on.
    """

    is_ready: bool = False
    is_working: bool = False
    is_acting: bool = False
    fatal: str | None = None
    catalog: Catalog | None = None
    hosts: tuple[HostEntry, ...] | None = None
    later_epoch: int | None = None
    entry: CatalogEntry | None = None
    news: tuple[News, ...] = ()
    loads: tuple[LoadProgress, ...] | None = None
    need: PoolNeed | None = None
    gateways: int | None = None
    is_accepting: bool | None = None


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
    """Get what the parent sends after the boot message: what came already, and all that follows.
    Called on a thread of its own; must not raise."""

    def run() -> None:
        while True:
            heed(_words.get())

    threading.Thread(target=run, name="parent-words", daemon=True).start()


def report(status: Status) -> None:
    """Write a status line; a supervisor that is gone needs none."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)


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
            _words.put(line)
        else:
            for ask in _askers:
                ask()
    # Not sys.exit: other threads may hold locks or compute, and there is nothing left to save.
    os._exit(0)
