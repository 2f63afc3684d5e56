"""Work that a stop does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def unless_stopped(work: Coroutine[Any, Any, object], stop: asyncio.Event) -> bool:
    """False if the stop came before the end of the work, which is cancelled and over then. Raises
    what the work raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, stopping):
        task.cancel()
    await asyncio.wait({working})
    if working.cancelled():
        return False
    working.result()
    return True
