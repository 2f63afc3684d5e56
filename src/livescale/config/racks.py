"""A file that says which machines stand in which rack: `RACK: [HOST, …]` for each, in YAML."""

from __future__ import annotations

from pathlib import Path

from livescale.common.settings import ConfigError, as_mapping, kind_of, read_yaml


def read_racks(path: Path) -> dict[str, str]:
    """The rack of each host, by the host's name. Raises ConfigError."""
    found: dict[str, str] = {}
    for rack, hosts in as_mapping(read_yaml(path), str(path)).items():
        where = f"{path}: {rack}"
        if not isinstance(hosts, list):
            raise ConfigError(f"{where} must be a list of hosts, not {kind_of(hosts)}")
        for host in map(str, hosts):
            if host in found:
                raise ConfigError(f"{where}: {host} is in {found[host]} already")
            found[host] = str(rack)
    return found
