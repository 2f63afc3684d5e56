"""The cluster's shape: devices, the hosts they sit in and the leaf switches they hang on.

Ground floor: values only. A rate of None means that it is not limited and not known.
"""

from __future__ import annotations

from livescale.types import Value


class Device(Value, frozen=True):
    """What one worker owns: a device with a NIC on a leaf switch, and its memory.

    `kind` names the accelerator model ("cpu", "h200"); capacities are measured per kind.
    Both directions of the NIC are independent (bytes per second).
    """

    kind: str
    host: str
    leaf: str
    arena_bytes: int
    kv_bytes: int
    uplink_bytes_per_s: int | None = None
    downlink_bytes_per_s: int | None = None


def hop_bytes_per_s(sender: Device, receiver: Device) -> int | None:
    """Rate of one hop: the slower of the sender's uplink and the receiver's downlink."""
    known = [r for r in (sender.uplink_bytes_per_s, receiver.downlink_bytes_per_s) if r is not None]
    return min(known) if known else None
