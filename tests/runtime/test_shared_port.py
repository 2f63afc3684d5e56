"""One port, several sockets: who gets a connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from livescale.common.settings import ConfigError
from livescale.runtime.supervisor import shared_port
from livescale.runtime.supervisor.listening import listen
from livescale.runtime.supervisor.shared_port import SharedPort
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

SOCKETS = 4
CONNECTIONS = 24


@pytest.fixture(scope="module", params=["127.0.0.1", "::1"])
def port(request: pytest.FixtureRequest) -> Iterator[SharedPort]:
    if request.param == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with contextlib.closing(SharedPort(request.param, 0, SOCKETS)) as made:
        yield made


def accepted(port: SharedPort, connections: int = CONNECTIONS) -> list[int]:
    """Of so many connections, how many came to each socket."""
    counts = [0] * SOCKETS
    with contextlib.ExitStack() as opened:
        for _ in range(connections):
            opened.enter_context(socket.create_connection(port.address, timeout=patient(20)))
        for number in range(SOCKETS):
            with socket.socket(fileno=socket.dup(port.fileno(number))) as listener:
                listener.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        listener.accept()[0].close()
                        counts[number] += 1
    return counts


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.sets(st.integers(0, SOCKETS - 1)).map(sorted))
def test_connections_come_to_those_that_are_named(port: SharedPort, numbers: Sequence[int]) -> None:
    """To all of them where none is."""
    port.deal_to(numbers)
    counts = accepted(port)
    assert sum(counts) == CONNECTIONS
    assert all(not count or not numbers or n in numbers for n, count in enumerate(counts))


def test_each_gets_its_share(port: SharedPort) -> None:
    port.deal_to(range(SOCKETS))
    # Half of what is due, four standard deviations off at least, comes once in 10,000 runs.
    assert min(accepted(port, 240)) > 30


def test_a_connection_that_waits_is_not_lost(port: SharedPort) -> None:
    """It came to a socket that gets none any more."""
    port.deal_to([1])
    with socket.create_connection(port.address, timeout=patient(20)):
        port.deal_to([0, 2])
        with socket.socket(fileno=socket.dup(port.fileno(1))) as listener:
            listener.settimeout(20)
            listener.accept()[0].close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_that_others_share_is_taken(port: SharedPort, count: int) -> None:
    host, number = port.address
    with pytest.raises(ConfigError, match=f"port {number} on {host} is in use"):
        SharedPort(host, number, count)


def test_a_port_of_one_socket_is_not_shared() -> None:
    with listen("127.0.0.1", 0) as alone, pytest.raises(ConfigError, match="in use"):
        SharedPort("127.0.0.1", alone.getsockname()[1], 2)


def test_a_port_that_is_closed_deals_nothing() -> None:
    made = SharedPort("127.0.0.1", 0, 2)
    made.close()
    made.deal_to([0])


def test_where_the_system_takes_no_program_all_get_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_port, "_SO_ATTACH_REUSEPORT_CBPF", 9999)
    with contextlib.closing(SharedPort("127.0.0.1", 0, SOCKETS)) as made:
        made.deal_to([0])
        made.deal_to([1])
        assert min(accepted(made, 240)) > 0
    assert len(caplog.records) == 1
