"""Folders of certificates for tests, made as people make them: with `livescale cluster`."""

from __future__ import annotations

from pathlib import Path

from livescale.common.credentials import Credentials
from livescale.runtime.cluster_folder import ClusterFolder


class Cluster:
    """An authority with its head, and members as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = ClusterFolder(path)
        self.head_dir = self.folder.init()

    def member_dir(self, name: str) -> Path:
        path = self.path / name
        return path if path.exists() else self.folder.add(name)

    def head(self) -> Credentials:
        return Credentials(self.head_dir)

    def member(self, name: str) -> Credentials:
        return Credentials(self.member_dir(name))
