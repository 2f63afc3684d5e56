"""A guest's process as who takes the layers has it. Light: this is imported into a server of
another system.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator

from livescale.common.errors import UserError
from livescale.common.interpreter import module_words
from livescale.runtime.guest.guest_messages import (
    AllTaken,
    FromGuest,
    GuestTerms,
    LayerThere,
    Leave,
    NothingComes,
    TakeLayer,
    receive,
    send,
)
from livescale.transfer.memory.arena import Arena
from livescale.values.types import Manifest

_MODULE = "livescale.runtime.guest.guest_process"


class GuestChild:
    """Joins the pool at once; ends with this process."""

    def __init__(self, terms: GuestTerms) -> None:
        self._end, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                module_words(_MODULE, str(number)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
            )
        self._send(terms)

    @property
    def pid(self) -> int:
        return self._process.pid

    def layers(self) -> Iterator[tuple[Manifest, memoryview, int]]:
        """Every layer in order, when it is there and verified: the manifest, the model's bytes and
        the layer's number. They are to be read until the next one is asked for. May be called
        again. Blocks; raises UserError."""
        memory: Arena | None = None
        manifest: Manifest | None = None
        self._send(TakeLayer(is_first=True))
        while not isinstance(answer := self._answer(), AllTaken):
            there, descriptor = answer
            if descriptor is not None:
                memory, manifest = Arena(there.memory_bytes, 0, descriptor), there.manifest
            assert memory is not None, f"{there} came without its memory"
            assert manifest is not None, f"{there} came without its manifest"
            yield manifest, memory.view(there.offset_bytes, manifest.size_bytes), there.number
            self._send(TakeLayer())

    def leave(self) -> None:
        """The guest leaves the pool in order, and ends by itself."""
        self._send(Leave())

    def wait(self, timeout_s: float) -> int:
        """The exit status of one that was let go. Raises TimeoutExpired."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it at once."""
        self._end.close()
        self._process.kill()
        self._process.wait()

    # -- helpers --------------------------------------------------------------------------------

    def _send(self, message: GuestTerms | TakeLayer | Leave) -> None:
        # One that is gone has told why, or its end is found when it is asked.
        with contextlib.suppress(OSError):
            send(self._end, message)

    def _answer(self) -> tuple[LayerThere, int | None] | AllTaken:
        """Raises UserError where nothing more comes."""
        try:
            found = receive(self._end, FromGuest)
        except OSError:
            found = None
        if found is None:
            raise UserError("the process that loads from the pool has ended: see its output")
        message, descriptor = found
        if isinstance(message, NothingComes):
            raise UserError(message.reason)
        if isinstance(message, AllTaken):
            return message
        assert isinstance(message, LayerThere), message
        return message, descriptor

    def __repr__(self) -> str:
        return f"<GuestChild {self.pid}>"
