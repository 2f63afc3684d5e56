"""ADDRESS:PORT as people write them."""

from __future__ import annotations

import ipaddress
import socket

from livescale.common.settings import ConfigError

_PORT_MAX = 65535


def parse_address(text: str, where: str, *, is_own: bool = True) -> tuple[str, int]:
    """Host and port of "127.0.0.1:7000" or "[::1]:7000". `where` is how errors call the text; an
    address that `is_own` is to be listened on. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ConfigError(f"{where} is '{text}'. Write ADDRESS:PORT, such as 10.0.0.1:7000")
    if is_own:
        _check_own(host, text, where)
    elif not int(port):
        raise ConfigError(f"{where} is '{text}'. Give the port of the head node, from 1 to 65535")
    else:
        _check_name(host, text, where)
    return host, int(port)


def is_loopback(address: str | None) -> bool:
    """Of ADDRESS:PORT: nothing leaves the machine. Raises ConfigError."""
    host = None if address is None else parse_address(address, "listen")[0]
    return host is None or ipaddress.ip_address(host).is_loopback


def address_text(host: str, port: int) -> str:
    """What `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Of sockets that are bound to the address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _check_own(host: str, text: str, where: str) -> None:
    """Others are told this address: a name, or one that means all of a machine, tells them
    nothing."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{where} is '{text}', and {host} is an invalid IP address") from None
    if address.is_unspecified:
        raise ConfigError(
            f"{where} is '{text}'. Give one address of this machine that other nodes can reach"
        )


def _check_name(host: str, text: str, where: str) -> None:
    """Of another machine. The resolver raises for some names what is no OSError."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(f"{where} is '{text}', and {host} is an invalid host name") from None
