"""Parcels and parameters that meet at a receiver whose token bucket is its link: no network is
emulated, so this needs no rights."""

from __future__ import annotations

from bed_planes import MODEL_BYTES, Pair, check_two_classes, local_planes

RATE = 22_000_000


def test_kv_of_another_sender_takes_as_long_as_alone() -> None:
    with local_planes([RATE] * 3, MODEL_BYTES) as made:
        check_two_classes(made, Pair(0, 1), Pair(2, 1), RATE)
