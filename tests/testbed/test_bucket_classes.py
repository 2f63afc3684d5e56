"""Parcels and parameters that meet at a receiver whose token bucket is its link: no network is
emulated, so this needs no rights."""

from __future__ import annotations

import pytest
from bed_planes import MODEL_BYTES, Pair, check_two_classes, local_planes
from bed_streams import slowed


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_kv_of_another_sender_takes_as_long_as_alone() -> None:
    rate = slowed(22_000_000)
    with local_planes([rate] * 3, MODEL_BYTES) as made:
        check_two_classes(made, Pair(0, 1), Pair(2, 1), rate)
