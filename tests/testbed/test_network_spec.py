"""What can be emulated, and the words for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.lab.testbed.spec import (
    NetworkSpec,
    TestbedError,
    goodput_bytes_per_s,
    parse_rate,
    shaping,
)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("1.5gbit", 1_500_000_000), ("500kbit", 500_000)],
)
def test_rates_are_read(text: str, bits_per_s: int) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "1", "gbit", "1gb", "-1gbit", "1 gbit", "1GBIT"])
def test_other_words_are_no_rates(text: str) -> None:
    with pytest.raises(TestbedError, match="is no rate"):
        parse_rate(text)


@given(hosts=st.integers(1, 64), data=st.data())
def test_hosts_are_dealt_to_leaves_in_even_blocks(hosts: int, data: st.DataObject) -> None:
    leaves = data.draw(st.integers(1, hosts))
    spec = NetworkSpec(hosts, 10**9, leaves=leaves)
    dealt = [spec.leaf_of(host) for host in range(hosts)]
    assert dealt == sorted(dealt)
    sizes = [dealt.count(leaf) for leaf in range(leaves)]
    assert sum(sizes) == hosts
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hosts": 0}, "hosts"),
        ({"hosts": 65}, "hosts"),
        ({"leaves": 3}, "leaves"),
        ({"leaves": 0}, "leaves"),
        ({"devices_per_host": 0}, "devices"),
        ({"link_bits_per_s": 10}, "link"),
        ({"spine_bits_per_s": 0}, "spine"),
    ],
)
def test_what_cannot_be_built_is_named(fields: dict[str, int], named: str) -> None:
    with pytest.raises(TestbedError, match=named):
        NetworkSpec(**{"hosts": 2, "link_bits_per_s": 10**9, **fields})


@given(rate=st.integers(10**6, 10**11))
def test_buckets_and_queues_are_short_in_time_and_hold_large_packets(rate: int) -> None:
    words = shaping(rate).split()
    burst, limit = int(words[words.index("burst") + 1]), int(words[words.index("limit") + 1])
    assert burst >= 128 << 10
    assert limit >= burst
    assert burst <= max(128 << 10, rate / 8 * 0.002)
    assert goodput_bytes_per_s(rate) == pytest.approx(0.956 * rate / 8, abs=1)
