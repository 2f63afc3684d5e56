"""A system that gives no thread for a while: the connections of that time fail, and no others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from transfer_world import WAIT_S, World

pytestmark = pytest.mark.usefixtures("machine")
_MIB = 1 << 20
_NO_STACK_BYTES = 1 << 47
"""More than there are addresses."""


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    before = threading.stack_size(_NO_STACK_BYTES)
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=lambda: None).start()
        yield
    finally:
        threading.stack_size(before)


def test_a_data_plane_accepts_others_after_one_that_it_had_no_thread_for() -> None:
    with World(2, _MIB, are_introduced=False) as world:
        caller, called = world.planes
        address = called.address
        with no_threads(), socket.create_connection(address, WAIT_S) as refused:
            assert refused.recv(1) == b"", "at once"
        caller.introduce(called.worker, address)
        caller.post(called.worker, b"a parcel", WAIT_S)
        assert caller.connected() == (called.worker,)


def test_a_peer_that_there_was_no_thread_for_is_called_later() -> None:
    with World(2, _MIB, are_introduced=False) as world:
        caller, called = world.planes
        with no_threads():
            caller.introduce(called.worker, called.address)
            assert caller.connected() == ()
        caller.post(called.worker, b"a parcel", WAIT_S)
        assert caller.connected() == (called.worker,)
