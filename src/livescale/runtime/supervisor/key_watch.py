"""The keys of a pool, read again when their files change: the supervisor's, who tells the gateway.

A file that is edited or replaced counts within about a second. One that is gone or broken changes
nothing: the keys of before go on to work, and one line in the log names what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import AsyncIterator, Mapping

from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.gateway.contract.keys import (
    ADMIN_KEY_VARIABLES,
    KEY_VARIABLES,
    KeyDigests,
    read_key_weights,
)

_log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often to look: reading the times of two files costs nothing."""
# A change of the same size right after a look might show the same time: files that have just
# changed are read again.
_SETTLED_NS = 2_000_000_000


class KeyWatch:
    """The keys that `config` and the variables in `environ` give."""

    def __init__(self, config: PoolConfig, environ: Mapping[str, str]) -> None:
        """Raises ConfigError, which never repeats a key."""
        self._api = _KeyFile("api_key_file", config.api_key_file, KEY_VARIABLES, environ)
        self._admin = _KeyFile(
            "admin_key_file", config.admin_key_file, ADMIN_KEY_VARIABLES, environ
        )

    @property
    def has_files(self) -> bool:
        """There is anything that can change."""
        return self._api.is_watched or self._admin.is_watched

    @property
    def digests(self) -> KeyDigests:
        """As they were at the last look."""
        weights = {digest: n for digest, n in self._api.weights.items() if n > 1}
        return KeyDigests(self._api.digests, self._admin.digests, weights)

    async def changes(self) -> AsyncIterator[KeyDigests]:
        """The keys, whenever they are others; ends at once where there is nothing to watch."""
        while self.has_files:
            await asyncio.sleep(LOOK_S)
            # A file may lie on another machine's disk.
            if await asyncio.to_thread(self.look):
                yield self.digests

    def look(self) -> bool:
        """Read what has changed; True if the keys are others now. Never raises."""
        before = self.digests
        self._api.look()
        self._admin.look()
        return self.digests != before


class _KeyFile:
    """The keys of one kind: those of its variables, and of its file if there is one."""

    def __init__(
        self, setting: str, path: str | None, variables: tuple[str, ...], environ: Mapping[str, str]
    ) -> None:
        self._setting = setting
        self._has_weights = variables == KEY_VARIABLES
        self._path = path
        self._variables = variables
        self._environ = {name: environ[name] for name in variables if name in environ}
        self._mark = _mark(path)
        # What cannot be read twice, as a pipe, is not watched.
        self.is_watched = self._mark is not None
        self._problem: str | None = None
        #: the digest of each key, and its client's weight
        self.weights = self._read()

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def look(self) -> None:
        if not self.is_watched:
            return
        mark = _mark(self._path)
        if mark is not None and mark == self._mark and not self._has_just_changed(mark):
            return
        # Taken before the file is read: what changes meanwhile is seen at the next look.
        self._mark = mark
        try:
            weights = self._read()
        except ConfigError as error:
            if str(error) != self._problem:
                _log.warning("%s. The previous keys stay valid", error)
            self._problem = str(error)
            return
        if weights != self.weights or self._problem is not None:
            _log.info("Reloaded %s %s: %d keys", self._setting, self._path, len(weights))
        self._problem = None
        self.weights = weights

    def _read(self) -> dict[str, int]:
        return read_key_weights(
            self._path,
            self._environ,
            variables=self._variables,
            setting=self._setting,
            has_weights=self._has_weights,
        )

    @staticmethod
    def _has_just_changed(mark: tuple[int, ...]) -> bool:
        return abs(time.time_ns() - mark[-1]) < _SETTLED_NS


def _mark(path: str | None) -> tuple[int, ...] | None:
    """What tells one content of a regular file from the next; None if there is no such file."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns
