"""The state directory: what was published and changed in a running pool, for its next start.

One file, replaced as a whole, and one lock: two pools never share a directory. What a pool makes
of the content is decided in `restoration.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

import msgspec

from livescale.common.settings import ConfigError
from livescale.config.model import ModelConfig
from livescale.values.types import Value

_FILE, _NEW_FILE, _LOCK = "models.json", "models.json.new", "lock"
_KIND = "livescale pool state"
_VERSION = 1
_FILE_BYTES_MAX = 64 << 20
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700


class ChangedModel(Value, frozen=True):
    """A model of the configuration whose limits were changed: as configured then, and now."""

    configured: ModelConfig
    now: ModelConfig


class PoolState(Value, frozen=True):
    """What outlives a pool: models that were published, and changed limits of configured ones."""

    published: tuple[ModelConfig, ...] = ()
    changed: tuple[ChangedModel, ...] = ()


class _Head(msgspec.Struct):
    """What tells the file from any other JSON; read before the rest is."""

    kind: str
    version: int


class _Document(Value, frozen=True):
    kind: str
    version: int
    state: PoolState


class StateDirectory:
    """The directory, locked for this process until `close`."""

    def __init__(self, path: Path) -> None:
        """Makes the directory if there is none. Raises ConfigError that names what is wrong."""
        self.path = path
        try:
            path.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
            _check_ours(path)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_fd = os.open(path / _LOCK, flags, _FILE_MODE)
        except OSError as error:
            raise ConfigError(f"state {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock_fd)
            who = f" (process {holder})" if holder.isdigit() else ""
            raise ConfigError(f"state {path}: another pool uses it{who}") from error
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # a full disk: no change could be kept
            os.close(self._lock_fd)
            raise ConfigError(f"state {path} cannot be used: {error.strerror}") from error
        self._is_open = True

    def read(self) -> PoolState:
        """What was kept; nothing yet is an empty state. Raises ConfigError for a file that is
        broken or another program's: it stays as it is."""
        file = self.path / _FILE
        try:
            with file.open("rb") as opened:
                raw = opened.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return PoolState()
        except OSError as error:
            raise ConfigError(f"state: {file} cannot be read: {error.strerror}") from error
        return _decoded(raw, file)

    def close(self) -> None:
        """Another pool may use the directory."""
        if self._is_open:
            self._is_open = False
            os.close(self._lock_fd)

    def __repr__(self) -> str:
        return f"<StateDirectory {self.path}{'' if self._is_open else ', closed'}>"


def write_state(directory: Path, state: PoolState) -> None:
    """Replace what is kept: afterwards it is on the disk, all of it, or as it was. For processes
    of the pool that holds the lock. Raises OSError."""
    raw = msgspec.json.encode(_Document(_KIND, _VERSION, state))
    new = directory / _NEW_FILE
    # What a process left that died while it wrote is of no use.
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(new, flags, _FILE_MODE), "wb") as file:
        file.write(msgspec.json.format(raw, indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(directory / _FILE)
    # The new name is on the disk only when the directory is.
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


# -- helpers, in the order used -------------------------------------------------------------------


def _check_ours(path: Path) -> None:
    """Who may write into the directory says which files the pool reads."""
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"state {path} is not a directory. Set another `state`")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"state {path} is owned by another user ({found.st_uid}). Set another `state`"
        )
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"state {path} is writable by other users (mode {mode:04o}). Run: chmod 700 {path}"
        )


def _decoded(raw: bytes, file: Path) -> PoolState:
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigError(f"state: {file} has more than {_FILE_BYTES_MAX} bytes")
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.kind != _KIND:
            raise msgspec.ValidationError(f"its kind is {head.kind[:50]!r}, not {_KIND!r}")
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"state: {file} is not a valid state file: {error}. Remove it, or set another `state`"
        ) from None
    if head.version != _VERSION:
        raise ConfigError(
            f"state: {file} has version {head.version}, this LiveScale reads version "
            f"{_VERSION}. Remove it, or set another `state`"
        )
    try:
        return msgspec.json.decode(raw, type=_Document).state
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"state: {file} is not a valid state file: {error}. Remove it, or set another `state`"
        ) from None
