"""Where a data plane listens, what it may send, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from livescale.transfer.links.exchange import ConnectionTerms

if TYPE_CHECKING:
    # A pool without certificates needs no library for them.
    from livescale.transfer.formats.sealing import Protection


_TERMS = ConnectionTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """It listens on an ephemeral port of `host`, and on a unix socket in `shm_directory` if there
    is one, for peers on a host of the same `host_name`. With a `protection` TCP is sealed
    (`sealing.py`). `carrier`: "auto"; "tcp" is without shared memory; "nixl" takes NIXL in the
    place of TCP, which all peers must do then.

    Parameters take `parameter_share_percent` of a limited uplink at most. A feed that brings
    nothing for `stall_s` is reported. `order_wait_s` bounds how long a want waits for its copy, and
    a feed for its holder to be introduced; `withdraw_wait_s` how long a peer may hold up `withdraw`
    and `abort` before it loses its connection.
    """

    host: str = "127.0.0.1"
    host_name: str = ""
    protection: Protection | None = None
    carrier: str = "auto"
    shm_directory: Path | None = None
    connections: ConnectionTerms = _TERMS
    uplink_bytes_per_s: int | None = None
    downlink_bytes_per_s: int | None = None
    parameter_share_percent: int = 100
    stall_s: float = 2.0
    order_wait_s: float = 10.0
    withdraw_wait_s: float = 2.0
