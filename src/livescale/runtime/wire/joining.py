"""Messages between the controller and the supervisor of a host or a gateway that joins; the other
messages are in `protocol.py`.
"""

from __future__ import annotations

from livescale.config.pool import PoolConfig
from livescale.control.cluster.host_ledger import HostNumbers
from livescale.values.types import Value

NAME_CHARS_MAX = 253
"""Of a host, or of the rack that it is in."""


class HostHello(Value, frozen=True, tag=True, forbid_unknown_fields=False):
    """The supervisor of a host that joins presents itself to the controller.

    It began at `clock_ns` by its own clock, has so many workers, each with `kv_bytes` for its KV
    cache (None: as the pool's), and its processes have `numbers` already if it was here before. A
    guest, which has no workers, `wants` a model.
    What another version says besides is no error: the answer names both versions.
    """

    version: str
    name: str
    workers: int
    clock_ns: int
    kv_bytes: int | None = None
    numbers: HostNumbers | None = None
    wants: str = ""


class RevokedMembers(Value, frozen=True, tag=True):
    """The list of certificates that count no more, signed by the pool's authority (PEM)."""

    listed: bytes


class Welcome(Value, frozen=True, tag=True):
    """The host has joined: what its processes are called, the pool's settings, and how large the
    pool's models are (a guest is told of the one that it wants). What is the host's own comes on
    top of the settings."""

    numbers: HostNumbers
    pool: PoolConfig
    model_bytes: tuple[int, ...] = ()


class GatewayJoins(Value, frozen=True, tag=True, forbid_unknown_fields=False):
    """The supervisor of a gateway on a machine of its own presents itself to the controller;
    `start` is the same whenever it connects again. What another version says besides is no error:
    the answer names both versions."""

    version: str
    name: str
    start: str = ""


class GatewayWelcome(Value, frozen=True, tag=True):
    """The gateway has joined: the pool's settings, and whether clients and administrators need
    keys. What is the gateway's own comes on top of the settings."""

    pool: PoolConfig
    has_api_keys: bool = False
    has_admin_keys: bool = False


class Farewell(Value, frozen=True, tag=True):
    """From a host with so many `members`: it wants to leave. From a gateway: it leaves. From the
    controller: nothing keeps it any more, or the pool ends; its processes may end."""

    members: int = 0
