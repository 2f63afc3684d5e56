"""Who may talk on a pool's wires: both ends prove that they know its secret, before anything else.

The messages of `livescale.common.proofs` travel in three blocks of fixed size, the first two behind
a word that names the protocol: a stranger makes this process read `FIRST_BYTES`, and keep no more.
What is sent later is not protected: this keeps other programs out, not a network that listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from livescale.common.proofs import NONCE_BYTES, PROOF_BYTES, CalledProof, CallerProof, ProofError
from livescale.types import WorkerRef

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


class StrangerError(ConnectionError):
    """What listens there is no such door of this pool: to try again will not help soon."""


def token_door(worker: WorkerRef) -> str:
    """The name of a worker's door for gateways. (Ports are used again: it says which life.)"""
    return f"tokens of {worker}"


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
        strangers_max: int = STRANGERS_MAX,
        greeting_s: float = GREETING_S,
    ) -> None:
        self._secret = secret
        self._name = name
        self._serve = serve
        self._strangers_max = strangers_max
        self._greeting_s = greeting_s
        #: in the order in which they came
        self._strangers: dict[asyncio.StreamWriter, None] = {}
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
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(self._greeting_s):
                await _answer(reader, writer, self._secret, self._name)
        except TimeoutError:
            return f"no proof within {self._greeting_s:g} s"
        except (OSError, EOFError, ProofError) as error:
            return str(error)
        finally:
            self._strangers.pop(writer, None)
        return None

    def _log_refusal(self, reason: str) -> None:
        """One line now and then: strangers must not fill the log."""
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_GAP_S:
            count, self._refused, self._logged_s = self._refused, 0, now_s
            _log.warning("%s: %d connections refused, the last: %s", self._name, count, reason)

    def __repr__(self) -> str:
        return f"<Door {self._name!r}, {len(self._strangers)} strangers>"


async def enter(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, name: str
) -> None:
    """Prove to the door of this name that this side is a member, after it has proved the same.

    Raises OSError; then the connection is closed.
    """
    side = CallerProof(secret, secrets.token_bytes(NONCE_BYTES))
    try:
        async with asyncio.timeout(GREETING_S):
            writer.write(PROTOCOL + side.nonce)
            answer = await reader.readexactly(FIRST_BYTES + PROOF_BYTES)
            writer.write(side.answer(_unwrapped(answer), _names(name)))
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"the {name} did not answer within {GREETING_S:g} s") from None
        if isinstance(error, ProofError):
            raise StrangerError(f"what listens there is not the {name}: {error}") from None
        if isinstance(error, EOFError):
            raise ConnectionError(f"what listens there is not the {name}: {error}") from None
        raise


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, name: str
) -> None:
    first = _unwrapped(await reader.readexactly(FIRST_BYTES))
    side = CalledProof(secret, secrets.token_bytes(NONCE_BYTES), first, _names(name))
    writer.write(PROTOCOL + side.message)
    side.check(await reader.readexactly(PROOF_BYTES))


def _unwrapped(message: bytes) -> bytes:
    if not message.startswith(PROTOCOL):
        raise ProofError("does not speak the protocol of this version's wires")
    return message[len(PROTOCOL) :]


def _names(name: str) -> bytes:
    # Longer than the names of a data plane's greeting: one is never taken for the other.
    return b"a wire of a pool, to " + name.encode()
