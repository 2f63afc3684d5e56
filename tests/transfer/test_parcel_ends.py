"""Who hears of the end of a connection: those whose parcels it may have lost."""

from __future__ import annotations

import queue
from functools import partial

import pytest
from transfer_world import WAIT_S, World

from livescale.transfer.formats.orders import TransferError
from livescale.values.types import WorkerRef

pytestmark = pytest.mark.usefixtures("machine")

MIB = 1 << 20


def test_the_end_of_a_connection_with_parcels_is_told_to_both() -> None:
    told: queue.Queue[tuple[int, object]] = queue.Queue()

    def tell(place: int, peer: WorkerRef, body: bytes | None = None) -> None:
        told.put((place, body if body is not None else peer))

    parcels = [partial(tell, place) for place in range(3)]
    with World(3, MIB, on_parcel=parcels, on_disconnected=parcels) as world:
        world.planes[1].reach(world.refs[2])
        # One after the other: two that call each other at once have two connections.
        world.planes[0].post(world.refs[1], b"one")
        assert told.get(timeout=WAIT_S) == (1, b"one")
        world.planes[1].post(world.refs[0], b"two")
        assert told.get(timeout=WAIT_S) == (0, b"two")
        # The connections with the third carried none.
        world.planes[2].close()
        world.planes[1].disconnect(world.refs[0])
        ends = {told.get(timeout=WAIT_S) for _ in range(2)}
        assert ends == {(1, world.refs[0]), (0, world.refs[1])}
        with pytest.raises(TransferError, match=r"w0\.0"):
            world.planes[1].post(world.refs[0], b"three")
    assert told.empty()


def test_a_parcel_waits_for_room_as_long_as_it_is_told_to() -> None:
    came: queue.Queue[int] = queue.Queue()
    rates = {"uplink_bytes_per_s": [1000 * MIB, 1000 * MIB]}
    with World(2, MIB, on_parcel=lambda _, body: came.put(len(body)), **rates) as world:
        for size in range(12):
            world.planes[0].post(world.refs[1], bytes(12 * MIB + size), WAIT_S)
        assert [came.get(timeout=WAIT_S) for _ in range(12)] == [12 * MIB + n for n in range(12)]
