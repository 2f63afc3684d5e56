"""What a pool takes before any process of it is started: its layout, its token, and the files that
it writes. What is wrong with any of them is an error then, and not later.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from livescale.clusters.files import read_topology
from livescale.common.addresses import parse_address
from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.runtime.layout.pool_layout import PoolLayout, layout_of, local_layout
from livescale.runtime.supervisor.machine import Interface, interface_at
from livescale.runtime.wire.news import News
from livescale.runtime.wire.token import make_token, new_secret
from livescale.telemetry.record.record_file import RecordClaim
from livescale.telemetry.record.record_parts import RecordError

if TYPE_CHECKING:
    from livescale.common.credentials import Credentials


def configured_layout(config: PoolConfig, tell: Callable[[News], None]) -> PoolLayout:
    """Where the processes run by the configuration alone: on this machine. What its interface says
    is news. Raises ConfigError."""
    if config.topology is not None:
        return layout_of(read_topology(Path(config.topology)).topology, config)
    if config.listen is None:
        return local_layout(config)
    return local_layout(config, own_rate(config, parse_address(config.listen, "listen")[0], tell))


def own_rate(
    config: PoolConfig,
    address: str,
    tell: Callable[[News], None],
    find: Callable[[str], Interface | None] = interface_at,
) -> int | None:
    """What the interface with this address, which `find` finds, says that its link carries, in
    bytes per second; people are told. None where it says nothing, and where both rates are
    configured or nothing leaves the machine."""
    is_told = config.uplink_bytes_per_s is not None and config.downlink_bytes_per_s is not None
    if is_told or ipaddress.ip_address(address).is_loopback:
        return None
    interface = find(address)
    if interface is None:
        return None
    probed = "; it is probed" if interface.bytes_per_s is None else ""
    tell(News(f"link of {interface.link}{probed}"))
    return interface.bytes_per_s


def token_path(config: PoolConfig, directory: Path) -> Path | None:
    """The file of the token that others join with: the configured one, or one in the pool's own
    `directory` (None: none may join)."""
    if config.listen is None:
        return None
    return directory / "token" if config.token_file is None else Path(config.token_file).absolute()


def claim_secret(token_file: Path | None, tls: Credentials | None) -> str:
    """That of the token, which fits the pool's certificates. Raises ConfigError."""
    if token_file is None:
        return new_secret()
    return make_token(token_file, None if tls is None else tls.fingerprint).secret


def claim_record(record: str | None) -> RecordClaim | None:
    """The record is this pool's alone from now on. A path that cannot be written, or that another
    pool writes, is an error before the start. Raises ConfigError."""
    if record is None:
        return None
    try:
        return RecordClaim(Path(record))
    except RecordError as error:
        raise ConfigError(f"record {error}") from error


def make_member_records(directory: str | None, start: str) -> str | None:
    """A new directory for what members of this start of the pool record. Raises ConfigError."""
    if directory is None:
        return None
    path = Path(directory) / start
    try:
        path.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"record_members {path}: {error.strerror}") from error
    return str(path)
