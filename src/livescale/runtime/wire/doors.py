"""Who may talk on a pool's wires: both ends prove that they know its secret, before anything else.

The messages of `livescale.common.proofs` travel in three blocks of fixed size, the first two behind
a word that names the protocol: a stranger makes this process read `FIRST_BYTES`, and keep no more.
In a pool with certificates TLS comes first (`common/credentials.py`), and protects what follows.
Without, what is sent later is not protected: that keeps other programs out, not a network that
listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from livescale.common.proofs import (
    NONCE_BYTES,
    PROOF_BYTES,
    CalledProof,
    CallerProof,
    ProofError,
    RevokedError,
)
from livescale.values.types import WorkerRef

if TYPE_CHECKING:
    # A pool without certificates needs no library for them.
    from livescale.common.credentials import Credentials

_log = logging.getLogger(__name__)

PROTOCOL = b"LSw2"
FIRST_BYTES = len(PROTOCOL) + NONCE_BYTES
"""All that is read of who has not proved anything yet."""
GREETING_S = 10.0
"""A greeting takes no longer than this, on either side."""
STRANGERS_MAX = 128
"""Connections that may be in their greeting. More than the system hands over at once, so that who
comes in a burst is answered before it has to make room."""
CONTROLLER_DOOR = "controller"
_LOG_GAP_S = 10.0
_REVOKED = b"LSrv".ljust(FIRST_BYTES + PROOF_BYTES, b"\0")
"""A door's answer to a member that was revoked."""


class StrangerError(ConnectionError):
    """What listens there is no such door of this pool: to try again will not help soon."""


class OutcastError(StrangerError):
    """This side's certificate was revoked: to try again will never help."""


def token_door(worker: WorkerRef) -> str:
    """The name of a worker's door for gateways. (Ports are used again: it says which life.)"""
    return f"tokens of {worker}"


def open_credentials(tls_dir: str | None) -> Credentials | None:
    """Those in the folder; None for a pool without certificates. Raises ConfigError."""
    if tls_dir is None:
        return None
    from livescale.common.credentials import Credentials

    return Credentials(Path(tls_dir))


class Door:
    """The accepting side of all connections to one listener: `serve` gets those that may talk.

    `accept` is what `asyncio.start_server` calls. When there are more than `strangers_max` that
    have not proved themselves the oldest of them has to go: strangers that hold connections open
    never keep a member out, and who has proved itself is not dropped.
    """

    def __init__(
        self,
        secret: str,
        name: str,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        *,
        tls: Credentials | None = None,
        strangers_max: int = STRANGERS_MAX,
        greeting_s: float = GREETING_S,
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._name = name
        self._serve = serve
        self._strangers_max = strangers_max
        self._greeting_s = greeting_s
        #: their greetings, in the order in which they came
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._refused = 0
        self._logged_s = -_LOG_GAP_S

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end, or close it."""
        # Cancelled only when the process ends; asyncio would log that as an error.
        with contextlib.suppress(asyncio.CancelledError):
            reason = await self._greet(reader, writer)
            if reason is None:
                await self._serve(reader, writer)
            else:
                writer.transport.abort()
                self._log_refusal(reason)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str | None:
        """Why the connection is refused (None: its other end is a member)."""
        while len(self._strangers) >= self._strangers_max:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
            self._log_refusal("it had to make room")
        task = asyncio.current_task()
        assert task is not None
        self._strangers[task] = None
        try:
            async with asyncio.timeout(self._greeting_s):
                # At once: nothing of what comes may have been read before.
                if self._tls is not None:
                    await _answer_with_tls(writer, self._tls)
                await _answer(reader, writer, self._secret, self._name)
        except TimeoutError:
            return f"no proof within {self._greeting_s:g} s"
        except (OSError, EOFError, ProofError) as error:
            return str(error)
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            self._strangers.pop(task, None)
        return None

    def _log_refusal(self, reason: str) -> None:
        """One line now and then: strangers must not fill the log."""
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_GAP_S:
            count, self._refused, self._logged_s = self._refused, 0, now_s
            _log.warning("%s: %d connections rejected. Last reason: %s", self._name, count, reason)

    def __repr__(self) -> str:
        return f"<Door {self._name!r}, {len(self._strangers)} strangers>"


async def enter(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: str,
    name: str,
    tls: Credentials | None = None,
) -> None:
    """Prove to the door of this name that this side is a member, after it has proved the same. The
    controller's door proves besides that it is a head's, where there are certificates.

    Raises OSError; then the connection is closed.
    """
    side = CallerProof(secret, secrets.token_bytes(NONCE_BYTES))
    try:
        async with asyncio.timeout(GREETING_S):
            if tls is not None:
                await writer.start_tls(tls.calling)
                tls.admit(writer, is_head=name == CONTROLLER_DOOR)
            writer.write(PROTOCOL + side.nonce)
            answer = await reader.readexactly(FIRST_BYTES + PROOF_BYTES)
            writer.write(side.answer(_unwrapped(answer), _names(name)))
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"the {name} did not answer within {GREETING_S:g} s") from None
        if isinstance(error, ProofError):
            raise StrangerError(f"what listens there is not the {name}: {error}") from None
        if isinstance(error, ssl.SSLError):
            reason = (
                f"the certificates of the {name} and of this machine do not match: {_words(error)}"
            )
            raise StrangerError(reason) from None
        if isinstance(error, EOFError | ConnectionResetError):
            reason = str(error) or "the connection was closed"
            raise ConnectionError(f"what listens there is not the {name}: {reason}") from None
        raise


async def _answer_with_tls(writer: asyncio.StreamWriter, tls: Credentials) -> None:
    await writer.start_tls(tls.answering)
    try:
        # What only hosts may do is refused behind the door: a gateway talks here, too.
        tls.admit(writer, may_be_gateway=True)
    except RevokedError:
        writer.write(_REVOKED)
        await writer.drain()
        writer.close()
        raise


def _words(error: ssl.SSLError) -> str:
    """What the library calls it, such as "tlsv13 alert certificate required"."""
    return (error.reason or str(error)).replace("_", " ").lower()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, name: str
) -> None:
    first = _unwrapped(await reader.readexactly(FIRST_BYTES))
    side = CalledProof(secret, secrets.token_bytes(NONCE_BYTES), first, _names(name))
    writer.write(PROTOCOL + side.message)
    side.check(await reader.readexactly(PROOF_BYTES))


def _unwrapped(message: bytes) -> bytes:
    if message == _REVOKED:
        raise OutcastError("the certificate of this machine was revoked")
    if not message.startswith(PROTOCOL):
        raise ProofError("does not speak the protocol of this version's wires")
    return message[len(PROTOCOL) :]


def _names(name: str) -> bytes:
    # Longer than the names of a data plane's greeting: one is never taken for the other.
    return b"a wire of a pool, to " + name.encode()
