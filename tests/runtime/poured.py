"""The tokens of a TokenStream as a test reads them: one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from livescale.gateway.contract.backend import Backend, GenerateRequest, TokenChunk, TokenStream


class Poured:
    """A TokenStream that is its own sink. Iteration ends with it, or raises its failure."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._came: asyncio.Queue[TokenChunk | Exception | None] = asyncio.Queue()
        stream.pour(self)

    @property
    def queued_s(self) -> float | None:
        return self._stream.queued_s

    def take(self, chunk: TokenChunk) -> None:
        self._came.put_nowait(chunk)

    def end(self, failure: Exception | None) -> None:
        self._came.put_nowait(failure)

    def cancel(self) -> None:
        self._stream.cancel()

    def stop(self) -> None:
        self._stream.stop()

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while (came := await self._came.get()) is not None:
            if isinstance(came, Exception):
                raise came
            yield came


def submitted(backend: Backend, requests: Sequence[GenerateRequest]) -> list[Poured]:
    """The streams of requests that the backend accepts."""
    return [Poured(stream) for stream in backend.submit(requests)]
