"""The rate that a probe finds, from the times at which its parts come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from livescale.transfer.links.probe import Probe

S_NS = 1_000_000_000
BYTE_NS = 50
#: asked for its peer alone, which errors name
CONNECTION: Any = SimpleNamespace(peer="w1.0")
PARTS = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=10)


@given(PARTS, st.integers(0, 1 << 40), st.integers(0, 10 * S_NS))
def test_the_rate_is_that_of_the_line_however_late_the_first_part_is(
    parts: list[int], begin_ns: int, late_ns: int
) -> None:
    """The way to the peer is no part of the rate, where more than one part comes."""
    probe = Probe(CONNECTION, sum(parts))
    at_ns = begin_ns + (late_ns if len(parts) > 1 else 0)
    for size in parts:
        probe.took(size, at_ns, at_ns + size * BYTE_NS)
        at_ns += size * BYTE_NS
    assert probe.wait(0) == S_NS // BYTE_NS
