"""What a testbed emulates, as values: hosts, devices, leaves and the rates of their links.

No commands are run here. Rates are those of the line; what is left for payload is `GOODPUT`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from livescale.common.errors import UserError
from livescale.values.types import Value


class TestbedError(UserError):
    """The testbed cannot be built or used; the message says what is missing or wrong."""

    __test__ = False  # pytest takes every class Test… for one of its own


GOODPUT = Fraction(956, 1000)
"""Payload of a TCP stream over the line rate: 1,448 bytes of every 1,514 on the wire."""

HOSTS_MAX = 64
DEVICES_PER_HOST_MAX = 16
LINK_BITS_PER_S_MIN = 1_000_000
LINK_BITS_PER_S_MAX = 100_000_000_000

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_BURST_BYTES_MIN = 128 << 10
_BURSTS_PER_S = 500  # 2 ms
_LIMIT_BYTES_MIN = 1 << 20
_LIMITS_PER_S = 50  # 20 ms


class NetworkSpec(Value, frozen=True):
    """Hosts on leaf switches under one spine. Rates are bits per second of each direction.

    Every device has a link of `link_bits_per_s` to its host's leaf, and so has every host itself
    (for its host copies). Hosts are dealt to `leaves` in blocks. A leaf's link to the spine has
    `spine_bits_per_s` (None: the same as a device's link). Raises TestbedError for what cannot be
    built.
    """

    hosts: int
    link_bits_per_s: int
    devices_per_host: int = 1
    leaves: int = 1
    spine_bits_per_s: int | None = None

    def __post_init__(self) -> None:
        _check("hosts", self.hosts, 1, HOSTS_MAX)
        _check("devices per host", self.devices_per_host, 1, DEVICES_PER_HOST_MAX)
        _check("leaves", self.leaves, 1, self.hosts)
        for name, rate in (("link", self.link_bits_per_s), ("spine", self.spine_bits_per_s)):
            if rate is not None:
                what = f"{name}, in bits per second,"
                _check(what, rate, LINK_BITS_PER_S_MIN, LINK_BITS_PER_S_MAX)

    def leaf_of(self, host: int) -> int:
        """The leaf of a host: blocks of hosts, as even as can be."""
        return host * self.leaves // self.hosts

    @property
    def leaf_bits_per_s(self) -> int:
        """Rate of a leaf's link to the spine."""
        return self.link_bits_per_s if self.spine_bits_per_s is None else self.spine_bits_per_s


def parse_rate(text: str) -> int:
    """Bits per second of "1gbit", "200mbit", "1.5gbit" or "500kbit". Raises TestbedError."""
    found = _RATE.fullmatch(text)
    if found is None:
        raise TestbedError(f"{text!r} is no rate, such as 200mbit or 1gbit")
    return int(Fraction(found[1]) * _UNITS[found[2]])


def goodput_bytes_per_s(bits_per_s: int) -> int:
    """Payload bytes per second of a link with this line rate."""
    return int(bits_per_s * GOODPUT / 8)


def shaping(bits_per_s: int) -> str:
    """The words for `tc qdisc` that give a link's end this rate.

    Large enough a bucket that the timer's grain costs no rate, and a queue of at most 20 ms.
    """
    burst_bytes = max(_BURST_BYTES_MIN, bits_per_s // 8 // _BURSTS_PER_S)
    limit_bytes = max(_LIMIT_BYTES_MIN, bits_per_s // 8 // _LIMITS_PER_S)
    return f"root handle 1: tbf rate {bits_per_s}bit burst {burst_bytes} limit {limit_bytes}"


SHUT = "root handle 1: tbf rate 8kbit burst 8 limit 8"
"""The words for `tc qdisc` that let nothing out: no packet is as small as the bucket."""


def _check(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise TestbedError(f"{what} must be between {least} and {most}, not {value}")
