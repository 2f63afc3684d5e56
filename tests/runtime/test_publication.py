"""A model that cannot be published now is refused, and can be published later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from livescale.config.pool import PoolConfig
from livescale.control.reports.status import ControllerStatus
from livescale.runtime.models.publication import Publication
from livescale.runtime.wire import protocol
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")
WAIT_S = 60.0


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """The system gives this process none, and so no pipe to another one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # all below are in use
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


def test_a_model_that_no_process_can_read_now_is_published_later(tiny_model: Path) -> None:
    async def publish() -> None:
        publication = Publication(
            protocol.Catalog(()),
            PoolConfig(),
            lambda: ControllerStatus({}, {}, 1, 1, host_room_bytes=1 << 30),
            lambda _: None,
            # The controller looks after each step; this pool keeps no copies to wait for.
            lambda: publication.observe([]),
            has_agents=False,
        )
        with no_descriptors():
            refused = await publication.answer(protocol.AddModel("1", str(tiny_model), "m", {}))
        assert refused.problem is protocol.ModelProblem.FAILED
        assert "Too many open files" in refused.reason
        assert publication.catalog().preparing == ()
        added = await publication.answer(protocol.AddModel("2", str(tiny_model), "m", {}))
        assert (added.problem, list(publication.models)) == (None, ["m"])

    asyncio.run(asyncio.wait_for(publish(), patient(WAIT_S)))
