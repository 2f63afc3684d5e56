"""What is a gateway's own: its name, for as long as it is connected, and its requests. Controller
and workers accept nothing else from the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from livescale.runtime.wire.wire_channel import Wire
from livescale.values.types import RequestId, gateway_of


def may_have_name(name: str, wire: Wire[Any], wires: Mapping[str, Wire[Any]]) -> bool:
    """Whether a gateway that has just connected may be called so beside those that are there. One
    that connects again shows the certificate that it has shown before; without certificates
    nothing tells it from others."""
    there = wires.get(name)
    return there is None or there.certificate == wire.certificate


def is_its_request(name: str, request: RequestId) -> bool:
    """Whether the gateway of this name answers for the request."""
    return gateway_of(request) == name
