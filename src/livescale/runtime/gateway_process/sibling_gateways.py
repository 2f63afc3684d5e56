"""What gateways behind one port tell one another: what each has counted.

Each keeps its counts in a file of the pool's directory, and listens on a unix socket there. One
that asks waits until the file has been written anew, and reads it. So what was shown once stays,
whichever process is asked next and whichever has died: the successor of a gateway goes on with its
file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from livescale.gateway.metrics.kept_counts import KeptCounts, SiblingCounts
from livescale.runtime.wire.boot import GatewayPlace

_log = logging.getLogger(__name__)
_WRITTEN = b"\n"
# A gateway under full load takes some tens of milliseconds; scrapers wait for 10 s.
_ANSWER_S = 1.0
Given = TypeVar("Given")
Result = TypeVar("Result")


class SiblingGateways:
    """Siblings of a gateway (`gateway/metrics/kept_counts.py`). Lives on its event loop,
    which files do not hold up: a busy disk must not keep tokens waiting."""

    def __init__(self, place: GatewayPlace) -> None:
        self._directory = Path(place.directory)
        self._number = place.number
        self._others = [n for n in range(place.count) if n != place.number]
        self._own: Callable[[], KeptCounts] = KeptCounts
        self._server: asyncio.Server | None = None
        # One thread: what was counted later is written later.
        self._files = ThreadPoolExecutor(1, "counts")
        #: of the others, as they were read last
        self._known = dict.fromkeys(self._others, KeptCounts())

    @property
    def name(self) -> str:
        return str(self._number)

    def earlier(self) -> KeptCounts:
        return self._read(self._number) or KeptCounts()

    def answer_with(self, own: Callable[[], KeptCounts]) -> None:
        self._own = own

    async def others(self, own: KeptCounts) -> Sequence[SiblingCounts]:
        keeping = self._begin(self._write, own)
        others = await asyncio.gather(*(self._ask(number) for number in self._others))
        await self._in_time(keeping)
        return others

    async def open(self) -> None:
        """Answer siblings that ask. Raises OSError."""
        path = self._socket(self._number)
        path.unlink(missing_ok=True)  # of the process before
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """The gateway has ended in order: its last counts stay."""
        if self._server is not None:
            self._server.close()
        await self._in_time(self._begin(self._write, self._own()))
        self._files.shutdown(wait=False)

    def __repr__(self) -> str:
        return f"<SiblingGateways of {self._number}: {self._others}>"

    # -- helpers, in the order used -------------------------------------------------------------

    async def _ask(self, number: int) -> SiblingCounts:
        """One that is busy may still have requests; one that is gone has none."""
        answers = is_there = True
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(number))
                try:
                    answers = await reader.read(len(_WRITTEN)) == _WRITTEN
                finally:
                    writer.close()
        except TimeoutError:
            answers = False
        except OSError:
            answers = is_there = False
        counts = await self._in_time(self._begin(self._read, number)) or self._known[number]
        self._known[number] = counts
        if not is_there:
            counts = msgspec.structs.replace(counts, readings=())
        return SiblingCounts(str(number), counts, answers)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if await self._in_time(self._begin(self._write, self._own())):
                writer.write(_WRITTEN)
            writer.close()
            await writer.wait_closed()

    def _begin(self, work: Callable[[Given], Result], given: Given) -> asyncio.Future[Result]:
        """On the thread for files, behind what has begun before."""
        return asyncio.get_running_loop().run_in_executor(self._files, work, given)

    async def _in_time(self, begun: asyncio.Future[Result]) -> Result | None:
        """None: it takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                return await begun
        return None

    def _write(self, own: KeptCounts) -> bool:
        """The file is whole at any time."""
        path = self._file(self._number)
        begun = path.with_suffix(".new")
        try:
            begun.write_bytes(msgspec.msgpack.encode(own))
            os.replace(begun, path)
        except OSError as error:
            _log.warning("Metrics of this gateway are unavailable to the other gateways: %s", error)
            return False
        return True

    def _read(self, number: int) -> KeptCounts | None:
        """None: there are none."""
        try:
            return msgspec.msgpack.decode(self._file(number).read_bytes(), type=KeptCounts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("gateway %d: its saved counters are unreadable: %s", number, error)
            return None

    def _file(self, number: int) -> Path:
        return self._directory / f"gateway-{number}.counts"

    def _socket(self, number: int) -> Path:
        return self._directory / f"gateway-{number}"
