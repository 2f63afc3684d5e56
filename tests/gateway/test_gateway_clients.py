"""Whose a request is: the client of a key, else of an address, and never the key itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import httpx
import pytest
from gateway_double import WAIT_S, LocalServer, ScriptedBackend, running
from hypothesis import given
from hypothesis import strategies as st

from livescale.gateway.contract.backend import Client
from livescale.gateway.contract.keys import KeyDigests, KeyRing, client_at, digest_of

pytestmark = pytest.mark.usefixtures("machine")

KEYS = {"sk-light": 1, "sk-heavy": 3}
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1, "n": 2}


@pytest.fixture
def keys() -> KeyRing:
    weights = {digest_of(key): weight for key, weight in KEYS.items() if weight > 1}
    return KeyRing(KeyDigests(tuple(map(digest_of, KEYS)), (), weights))


@pytest.fixture
def guarded(backend: ScriptedBackend, keys: KeyRing) -> Iterator[LocalServer]:
    with running(backend, keys=keys) as server:
        yield server


def client_of(
    server: LocalServer,
    backend: ScriptedBackend,
    address: str,
    key: str | None = None,
    **headers: str,
) -> Client:
    """Who sends a request, by what the backend gets."""
    headers |= {} if key is None else {"authorization": f"Bearer {key}"}
    transport = httpx.HTTPTransport(local_address=address)
    before = len(backend.streams)
    with httpx.Client(transport=transport, timeout=WAIT_S, headers=headers) as client:
        response = client.post(f"{server.url}/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    clients = {stream.request.client for stream in backend.streams[before:]}
    assert len(backend.streams) == before + 2
    assert clients == {backend.admitted_clients[-1]}
    return clients.pop()


def test_without_keys_a_client_is_an_address(backend: ScriptedBackend) -> None:
    """Whatever connection it opens, and whatever key it shows."""
    with running(backend) as server:
        for address in ("127.0.0.1", "127.0.0.2"):
            for key in (None, "anything"):
                assert client_of(server, backend, address, key) == Client(address)


def test_a_proxy_of_this_machine_tells_who_the_client_is(backend: ScriptedBackend) -> None:
    """No other sender of that header is believed."""
    forwarded = {"x-forwarded-for": "10.9.9.9, 192.0.2.7"}
    with running(backend) as server:
        assert client_of(server, backend, "127.0.0.1", **forwarded) == Client("192.0.2.7")
        assert client_of(server, backend, "127.0.0.2", **forwarded) == Client("127.0.0.2")


def test_with_keys_a_client_is_a_key(
    guarded: LocalServer, backend: ScriptedBackend, keys: KeyRing
) -> None:
    """Wherever it comes from; its name tells nothing of the key but which of them it is."""
    found = {}
    for key, weight in KEYS.items():
        clients = {client_of(guarded, backend, f"127.0.0.{n}", key) for n in (1, 2)}
        found[key] = clients.pop()
        assert not clients
        assert found[key].weight == weight
        assert key not in found[key].name
        assert digest_of(key) not in found[key].name
    assert len({client.name for client in found.values()}) == len(KEYS)
    # Weights are read again as keys are.
    keys.replace(KeyDigests(keys.digests.api, (), {digest_of("sk-light"): 7}))
    again = client_of(guarded, backend, "127.0.0.1", "sk-light")
    assert (again.name, again.weight) == (found["sk-light"].name, 7)


@given(st.ip_addresses(v=4), st.integers(1, 65535))
def test_an_ipv4_address_is_a_client(address: ipaddress.IPv4Address, port: int) -> None:
    assert client_at((str(address), port)) == Client(str(address))
    assert client_at((f"::ffff:{address}", port)) == Client(str(address))


plain_ipv6 = st.ip_addresses(v=6).filter(lambda address: address.ipv4_mapped is None)


@given(plain_ipv6, plain_ipv6, st.integers(0, 2**64 - 1))
def test_the_ipv6_addresses_of_a_subscriber_are_one_client(
    address: ipaddress.IPv6Address, other: ipaddress.IPv6Address, host: int
) -> None:
    near = ipaddress.IPv6Address(int(address) >> 64 << 64 | host)
    if near.ipv4_mapped is None:
        assert client_at((str(near), 1)) == client_at((str(address), 2))
    is_same = client_at((f"{address}%eth0", 1)) == client_at((str(other), 1))
    assert is_same == (int(address) >> 64 == int(other) >> 64)


@given(st.none() | st.tuples(st.text().filter(lambda text: not is_address(text)), st.just(0)))
def test_all_whose_address_is_not_known_are_one_client(peer: tuple[str, int] | None) -> None:
    assert client_at(peer) == Client()


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
