"""What a client is: a key, else an address."""

from __future__ import annotations

import ipaddress

from livescale.gateway.backend import Client

_DIGEST_CHARS = 12
"""Of a key's digest: enough to tell the keys of a pool apart, and no help to guess one."""
_IPV6_PREFIX_BITS = 64
"""What one subscriber has of IPv6: its addresses are as many as it likes."""


def client_at(peer: tuple[str, int] | None) -> Client:
    """The client at the other end of a connection (address and port, as ASGI names it).

    An IPv6 address counts by its /64. All whose address is not known are one client.
    """
    try:
        address = ipaddress.ip_address(peer[0] if peer is not None else "")
    except ValueError:
        return Client()
    if isinstance(address, ipaddress.IPv4Address):
        return Client(str(address))
    if address.ipv4_mapped is not None:
        return Client(str(address.ipv4_mapped))
    # Without its zone, which is a matter of this machine.
    return Client(str(ipaddress.IPv6Network((int(address), _IPV6_PREFIX_BITS), strict=False)))


def client_with(digest: str, weight: int) -> Client:
    """The client that holds the key with this digest."""
    return Client(f"key-{digest[:_DIGEST_CHARS]}", weight)
