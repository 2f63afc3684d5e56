"""What a machine that joins is in the pool's topology."""

from __future__ import annotations

import pytest

from livescale.config.pool import PoolConfig
from livescale.runtime.pool_layout import joined_seat


@pytest.mark.parametrize(("rack", "leaf"), [("", "leaf0"), ("rack-b", "rack-b")])
def test_a_host_hangs_on_the_leaf_that_it_names(rack: str, leaf: str) -> None:
    seat = joined_seat(PoolConfig(models=(), workers=2), "h", "127.0.0.1", rack=rack)
    assert [seat.host.leaf, *(one.device.leaf for one in seat.devices)] == [leaf] * 3
