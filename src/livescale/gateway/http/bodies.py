"""From a request to the bytes of its body: how much may come, of what kind, and all at once.

No meaning: what the bytes stand for is decided in `schema.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from livescale.gateway.contract import errors
from livescale.gateway.contract.keys import KeyRing
from livescale.gateway.contract.limits import Limits
from livescale.gateway.contract.pacing import ByteBudget
from livescale.gateway.requests.sampling import GENERATIONS_MAX

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are read at once, whatever others send; they hold little."""
BODIES_BYTES_MAX = 32 * 1024 * 1024
"""Larger bodies that are in the gateway at once, until they have become token ids."""
SLOW_S = 5.0
"""A body that holds others up brings `SMALL_BODY_BYTES` in this time, or is refused."""
OPENINGS_MAX = 8192
"""Lists and objects of a body."""
KEYS_MAX = 16_384
"""Members of all its objects."""
VALUES_MAX = 32_768
"""Entries of its lists and objects that are no token ids of a prompt."""
_COUNTED_BYTES = 32 * 1024
"""So much is counted at once; then the event loop goes on with other requests."""


class Bodies:
    """Reads the bodies of one gateway's requests. Lives on its event loop."""

    def __init__(
        self,
        limits: Limits,
        prompt_tokens_max: Callable[[], int],
        text_chars_max: Callable[[], int | None],
        keys: KeyRing,
    ) -> None:
        """`prompt_tokens_max` is the longest prompt of ids that any model could take now, and
        `text_chars_max` the longest text (None: not known)."""
        self._limits = limits
        self._prompt_tokens_max = prompt_tokens_max
        self._text_chars_max = text_chars_max
        self._keys = keys
        self._budget = ByteBudget(max(BODIES_BYTES_MAX, limits.body_bytes_max))

    async def read(self, request: Request) -> bytes:
        """The whole body, where what is made of it is no larger. Raises as `reading` does."""
        async with self.reading(request) as body:
            return body

    def reading(self, request: Request) -> AbstractAsyncContextManager[bytes]:
        """The whole body, which counts as being in the gateway until the end of the block.

        Raises ApiError: 400 (a text that no model could hold), 408, 413, 415; for what is too
        much before more than a bound is kept in memory.
        """
        return _Reading(self, request)

    # -- helpers, in the order used ---------------------------------------------------------

    def place(self, request: Request) -> AbstractAsyncContextManager[None] | None:
        """What to wait for before more than a small body is read (None: nothing): its client's
        bytes stay where they are meanwhile. Raises ApiError."""
        limits = self._limits
        self._check_media_type(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limits.body_bytes_max:
            raise errors.body_too_large(limits.body_bytes_max)
        wanted_bytes = int(declared) if declared.isdigit() else limits.body_bytes_max
        return None if wanted_bytes <= SMALL_BODY_BYTES else self._budget.holding(wanted_bytes)

    def _check_media_type(self, request: Request) -> None:
        """Without a key any web page that the user visits could ask, but only with the types that
        browsers let pages send anywhere, or with none. Raises ApiError (415)."""
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() == "application/json" or self._keys.needs_key(request.url.path):
            return
        raise errors.wrong_media_type()

    async def received(self, request: Request, take_place: Callable[[], Awaitable[None]]) -> bytes:
        """All of it; `take_place` is called when it has turned out to be no small one. Raises
        ApiError, or ClientDisconnect."""
        limits, count = self._limits, StructureCount()
        parts: list[bytes] = []
        received_bytes = counted_parts = 0
        progress: _Progress | None = None
        try:
            async with asyncio.timeout(limits.receive_timeout_s):
                has_more = True
                while has_more:
                    message = await self._next_part(request, progress)
                    has_more = message.get("more_body", False)
                    part = message.get("body", b"")
                    parts.append(part)
                    received_bytes += len(part)
                    if received_bytes > limits.body_bytes_max:
                        raise errors.body_too_large(limits.body_bytes_max)
                    if received_bytes > SMALL_BODY_BYTES:
                        if progress is None:
                            await take_place()
                            progress = _Progress()
                        progress.came(len(part))
                        for uncounted in parts[counted_parts:]:
                            await self._count(count, uncounted)
                        counted_parts = len(parts)
        except TimeoutError:
            raise errors.request_too_slow(limits.receive_timeout_s) from None
        return b"".join(parts)

    async def _next_part(self, request: Request, progress: _Progress | None) -> Message:
        """What comes next. Who holds a place and brings next to nothing loses it to those who wait.
        Raises ApiError (408), or ClientDisconnect."""
        while True:
            if progress is not None and progress.is_slow() and self._budget.is_wanted:
                raise errors.request_too_slow(SLOW_S)
            try:
                async with asyncio.timeout(None if progress is None else progress.left_s):
                    message = await request.receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            return message

    async def _count(self, count: StructureCount, part: bytes) -> None:
        """Raises ApiError (400, 413) at the first slice that is too much."""
        for start in range(0, len(part), _COUNTED_BYTES):
            count.feed(part[start : start + _COUNTED_BYTES])
            self._check_structure(count)
            await asyncio.sleep(0)

    def _check_structure(self, count: StructureCount) -> None:
        """Raises ApiError (400, 413)."""
        chars_max = self._text_chars_max()
        if chars_max is not None and count.string_chars > chars_max:
            raise errors.context_length_exceeded(
                f"A text has more than {chars_max} characters, above the limit of every "
                "model in the pool"
            )
        prompts = min(count.openings, GENERATIONS_MAX)
        values_max = VALUES_MAX + prompts * self._prompt_tokens_max()
        for number, bound, things in (
            (count.openings, OPENINGS_MAX, "lists and objects"),
            (count.keys, KEYS_MAX, "members of objects"),
            (count.commas, values_max, "values"),
        ):
            if number > bound:
                message = f"The request body has more than {bound} {things}"
                raise errors.ApiError(413, message, code="request_too_large")


class _Reading:
    """See `Bodies.reading`. No generators: an event loop keeps a list of those that are async, and
    a request with three of them takes a twentieth of its time for that."""

    __slots__ = ("_bodies", "_place", "_request")

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies = bodies
        self._request = request
        self._place: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> bytes:
        place = self._bodies.place(self._request)

        async def take_place() -> None:
            if place is not None:
                await place.__aenter__()
                self._place = place

        try:
            return await self._bodies.received(self._request, take_place)
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._place is not None:
            await self._place.__aexit__(None, None, None)


class _Progress:
    """What has come of a body in the last `SLOW_S`. Lives on an event loop."""

    def __init__(self) -> None:
        self._since_s = asyncio.get_running_loop().time()
        self._bytes = 0

    def came(self, size_bytes: int) -> None:
        self._bytes += size_bytes

    @property
    def left_s(self) -> float:
        """Until the time is over."""
        return max(self._since_s + SLOW_S - asyncio.get_running_loop().time(), 0.0)

    def is_slow(self) -> bool:
        """The time is over, and next to nothing has come in it. Then it begins anew."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._since_s + SLOW_S:
            return False
        is_slow = self._bytes < SMALL_BODY_BYTES
        self._since_s, self._bytes = now_s, 0
        return is_slow


_KEPT = b'"[{:,'
_DROPPED = bytes(byte for byte in range(256) if byte not in _KEPT)
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_HEX_DIGITS_AND_U = 5


class StructureCount:
    """Counts what lies outside of strings. `openings` are lists and objects, `keys` the members
    of objects, `commas` one less than the entries of each list and object. `string_chars`: the
    longest string that did not end in the part that it began in has at least so many characters.

    The counts of a text that is not JSON mean nothing, and are never too small for one that is.
    """

    def __init__(self) -> None:
        self.openings = 0
        self.keys = 0
        self.commas = 0
        self.string_chars = 0
        self._is_in_string = False
        #: of the string that the last part ended in
        self._begun_chars = 0
        #: a backslash that ends a part: what it escapes is in the next one
        self._carried = b""

    def feed(self, part: bytes) -> None:
        """Count the next part."""
        text = self._carried + part
        plain = text.replace(rb"\\", b"")
        self._carried = b""
        if plain.endswith(b"\\"):
            plain, self._carried = plain[:-1], b"\\"
        # With escaped quotes gone every quote begins or ends a string.
        plain = plain.replace(rb"\"", b"")
        if self._is_in_string:
            self._begun_chars += _least_chars(plain.partition(b'"')[0])
            self.string_chars = max(self.string_chars, self._begun_chars)
            if b'"' not in plain:
                return
            plain = b'"' + plain
        pieces = plain.translate(None, _DROPPED).split(b'"')
        # Strings and what is between them take turns.
        outside = b"".join(pieces[::2])
        self._is_in_string = len(pieces) % 2 == 0
        if self._is_in_string:
            self._begun_chars = _least_chars(plain.rpartition(b'"')[2])
        self.openings += outside.count(b"[") + outside.count(b"{")
        self.keys += outside.count(b":")
        self.commas += outside.count(b",")


def _least_chars(inside: bytes) -> int:
    """The characters of a piece of a string, or fewer."""
    chars = len(inside)
    if not inside.isascii():
        chars = len(inside.translate(None, _CONTINUATIONS))
    # An escape is one character, or (\uXXXX) half of one.
    return chars - inside.count(b"\\") - _HEX_DIGITS_AND_U * inside.count(rb"\u")
