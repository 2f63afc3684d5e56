"""What a machine that joins is in the pool's topology."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from machine_files import addresses, make_interface

from livescale.clusters.topology import Device, Host
from livescale.config.pool import PoolConfig
from livescale.runtime.layout.pool_layout import HostSeat, joined_seat, local_layout
from livescale.runtime.supervisor.machine import interface_at
from livescale.runtime.supervisor.pool_claims import own_rate
from livescale.runtime.wire.news import News

CONFIG = PoolConfig(models=(), workers=2)
TOLD = PoolConfig(models=(), workers=2, uplink_bytes_per_s=1 << 20, downlink_bytes_per_s=1 << 20)
GIGABIT = 125_000_000
UNKNOWN = "link of eth1: rate not known ({} does not say); it is probed"


def places(seat: HostSeat) -> list[Device | Host]:
    return [seat.host, *(one.device for one in seat.devices)]


@pytest.mark.parametrize(("rack", "leaf"), [("", "leaf0"), ("rack-b", "rack-b")])
def test_a_host_hangs_on_the_leaf_that_it_names(rack: str, leaf: str) -> None:
    seat = joined_seat(CONFIG, "h", "127.0.0.1", rack=rack)
    assert [place.leaf for place in places(seat)] == [leaf] * 3


def test_all_of_a_host_has_the_link_of_its_interface() -> None:
    joined = joined_seat(CONFIG, "h", "127.0.0.1", interface_bytes_per_s=GIGABIT)
    (own,) = local_layout(CONFIG, GIGABIT).hosts
    for seat in (joined, own):
        assert [place.interface_bytes_per_s for place in places(seat)] == [GIGABIT] * 3
        # No data plane holds itself to it.
        assert {place.uplink_bytes_per_s for place in places(seat)} == {None}


@pytest.mark.parametrize("own", [GIGABIT, None])
def test_the_link_of_the_head_bounds_chunks_unless_rates_are_set(own: int | None) -> None:
    assert set(local_layout(CONFIG, own).rates_bytes_per_s) == {own}
    assert set(local_layout(TOLD, own).rates_bytes_per_s) == {1 << 20}


@pytest.mark.parametrize(
    ("config", "address", "rate", "news"),
    [
        (CONFIG, "10.0.0.1", GIGABIT, ["link of eth0: 1 Gbit/s each way ({})"]),
        (
            CONFIG,
            "10.0.0.2",
            None,
            [UNKNOWN],
        ),
        (TOLD, "10.0.0.1", None, []),
        (CONFIG, "127.0.0.1", None, []),
        (CONFIG, "10.0.0.3", None, []),
    ],
    ids=["card", "no rate", "set", "loopback", "no interface"],
)
def test_what_a_machine_says_of_its_link_is_told(
    config: PoolConfig, address: str, rate: int | None, news: list[str], tmp_path: Path
) -> None:
    make_interface(tmp_path, "eth0", speed=1000)
    make_interface(tmp_path, "eth1", speed=-1)
    make_interface(tmp_path, "lo", speed=1000)
    known = addresses({"eth0": "10.0.0.1", "eth1": "10.0.0.2", "lo": "127.0.0.1"})
    told: list[News] = []
    find = partial(interface_at, root=tmp_path, addresses=known)
    assert own_rate(config, address, told.append, find) == rate
    speeds = [tmp_path / "class" / "net" / name / "speed" for name in ("eth0", "eth1")]
    place = speeds[0] if rate else speeds[1]
    assert [one.text for one in told] == [text.format(place) for text in news]
