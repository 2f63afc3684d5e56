"""Folders of certificates for tests, made as people make them: with `livescale cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pool_thread import LocalPool

from livescale.common.credentials import Credentials
from livescale.runtime.join.cluster_folder import ClusterFolder
from livescale.runtime.wire.token import JoinToken, read_token
from slowness import patient_ms


def lost_after_ms() -> int:
    """A function: how slow the machine is was not measured when this module was imported."""
    return patient_ms(2000)


class Cluster:
    """An authority with its head, and members as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = ClusterFolder(path)
        self.head_dir = self.folder.init()

    def member_dir(self, name: str) -> Path:
        path = self.path / name
        return path if path.exists() else self.folder.add(name)

    def gateway_dir(self, name: str) -> Path:
        """Of a machine that may be a gateway only."""
        path = self.path / name
        return path if path.exists() else self.folder.add(name, is_gateway=True)

    def head(self) -> Credentials:
        return Credentials(self.head_dir)

    def member(self, name: str) -> Credentials:
        return Credentials(self.member_dir(name))

    def head_settings(self, scratch: Path) -> dict[str, Any]:
        """Of a head without devices that others join."""
        return {
            "device": "timed",
            "workers": 0,
            "listen": "127.0.0.1:0",
            "token_file": str(scratch / "token"),
            "tls_dir": str(self.head_dir),
            "timed_run_us": 20_000,
            "lost_after_ms": lost_after_ms(),
            "request_attempts_max": 4,
        }


def token_of(head: LocalPool) -> JoinToken:
    """What others join it with."""
    assert head.pool.token_file is not None
    return read_token(Path(head.pool.token_file))
