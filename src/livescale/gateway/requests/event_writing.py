"""A stream's events on the direct way: written at the end of the turn that brings their tokens.

No task and no ASGI message for a token. What is not written yet waits as tokens, and is joined.
"""

from __future__ import annotations

import asyncio
from functools import partial

from livescale.gateway.requests.arrivals import Arrivals, TurnEnd
from livescale.gateway.requests.direct import BodyWriter
from livescale.gateway.requests.replies import StreamableReply


class EventWriting:
    """Waits for the first tokens without a task, and writes what follows until the answer is over
    or the client gone. From `open` to `close`."""

    __slots__ = (
        "_arrivals",
        "_how",
        "_is_late",
        "_is_over",
        "_reply",
        "_timer",
        "_turn_end",
        "_waiting",
        "_writer",
    )

    def __init__(
        self, arrivals: Arrivals, reply: StreamableReply, writer: BodyWriter, turn_end: TurnEnd
    ) -> None:
        self._arrivals = arrivals
        self._reply = reply
        self._writer = writer
        self._turn_end = turn_end
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._is_over = self._is_late = False
        #: the last events, or why there are none, or None: no client is there
        self._how: bytes | Exception | None = None

    def open(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s, self._time_is_over)
        self._writer.open(self)

    def close(self) -> None:
        self._arrivals.notify = _nothing
        self._writer.close()
        if self._timer is not None:
            self._timer.cancel()

    async def has_more(self) -> bool:
        """Wait until something has come. False: the client is gone. Raises TimeoutError."""
        if not self._arrivals.came:
            self._arrivals.notify = self._wake
            await self._wait()
        self._check_time()
        return not self._is_over

    async def run(self) -> bytes | Exception | None:
        """From the answer's second event on. Returns the events of the last tokens, which have not
        been written, or what cut the answer short; None if the client is gone. Raises
        TimeoutError."""
        self._arrivals.notify = partial(self._turn_end.call, self._write)
        self._writer.take_over()
        self.resume()  # for what came before `notify`
        await self._wait()
        self._check_time()
        return self._how

    def resume(self) -> None:
        """What has arrived is written when this turn is over."""
        self._arrivals.notify()

    def lost(self) -> None:
        self._settle(None)

    # -- helpers, in the order used ---------------------------------------------------------

    def _time_is_over(self) -> None:
        self._is_late = True
        self._settle(None)

    def _check_time(self) -> None:
        if self._is_late:
            raise TimeoutError

    async def _wait(self) -> None:
        if not self._is_over:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _settle(self, how: bytes | Exception | None) -> None:
        if not self._is_over:
            self._is_over, self._how = True, how
            self._wake()

    def _write(self) -> None:
        arrivals, writer = self._arrivals, self._writer
        try:
            while arrivals.came and not (writer.is_paused or self._is_over):
                plain = arrivals.take_plain()
                if plain is not None:
                    writer.write(self._reply.plain_event(*plain))
                    return
                pieces = arrivals.take()
                if not pieces:
                    continue
                events = self._reply.events(pieces)
                if arrivals.unfinished:
                    writer.write(events)
                else:
                    self._settle(events)
        except Exception as error:
            self._settle(error)

    def __repr__(self) -> str:
        return f"<EventWriting of {self._arrivals}, over={self._is_over}>"


def _nothing() -> None:
    """What comes when an answer is over changes nothing."""
