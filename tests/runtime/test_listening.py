"""Listening sockets of either family."""

from __future__ import annotations

import socket

import pytest

from livescale.runtime.supervisor.listening import listen
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_socket_listens_where_it_is_told(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port), timeout=patient(20)):
            pass
