"""Parcels and parameters on shaped links: the figures of the simulator's two classes, on sockets.

Rates are set, as in a pool with `uplink_bytes_per_s` and `downlink_bytes_per_s`, a little below
what the links carry, so that what waits does so in the data plane and not in a switch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed_planes import MODEL_BYTES, BedPlanes, Pair, check_two_classes, planes
from bed_streams import slowed

from effort import mostly_long
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec, goodput_bytes_per_s

pytestmark = pytest.mark.usefixtures("network_namespaces")

LINK = 200_000_000


@pytest.fixture(scope="module")
def bed_planes(network_namespaces: None) -> Iterator[BedPlanes]:
    link = slowed(LINK)
    with (
        Testbed(NetworkSpec(3, link)) as bed,
        planes(bed, rate_of(link), MODEL_BYTES) as made,
    ):
        yield made


def rate_of(link: int) -> int:
    return goodput_bytes_per_s(link) * 95 // 100


@pytest.mark.parametrize(
    "parcels", mostly_long([Pair(0, 1), Pair(0, 2), Pair(2, 1)], short=[Pair(0, 2)])
)
def test_kv_takes_as_long_as_alone_and_parameters_half_as_long_again(
    bed_planes: BedPlanes, parcels: Pair
) -> None:
    """To the worker that loads or to another one; from the same sender or from another one."""
    check_two_classes(bed_planes, Pair(0, 1), parcels, bed_planes.rates[0])
