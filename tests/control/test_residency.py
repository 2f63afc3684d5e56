"""Which first layers a worker keeps: within its memory, apart from each other, the newest."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.policy.residency import ResidentLayers

MODELS = st.sampled_from("abcd")
LAYERS = st.lists(st.integers(1, 9), min_size=3, max_size=8)


@given(
    st.integers(0, 20),
    st.integers(0, 40),
    st.lists(st.one_of(st.tuples(MODELS, LAYERS), st.integers(0, 60)), max_size=12),
)
def test_what_is_kept_fits_and_does_not_overlap(
    start: int, size: int, steps: list[tuple[str, list[int]] | int]
) -> None:
    residents = ResidentLayers(start, start + size)
    sizes: dict[str, list[int]] = {}
    for step in steps:
        if isinstance(step, int):
            residents.make_way(step)
            assert all(
                found.offset_bytes >= step
                for model in "abcd"
                if (found := residents.find(model)) is not None
            )
            continue
        model, layer_bytes = step
        kept = residents.keep(model, layer_bytes)
        sizes[model] = layer_bytes
        assert residents.find(model) == kept, "the newest stays"
        # As many layers as fit, half of the decoder layers at most, or nothing.
        half = 1 + (len(layer_bytes) - 1) // 2
        fitting = sum(1 for n in range(1, len(layer_bytes)) if sum(layer_bytes[:n]) <= size)
        count = min(half, fitting)
        assert (kept.layers if kept is not None else 0) == (count if count >= 2 else 0)
        places = []
        for name, layer_bytes in sizes.items():
            found = residents.find(name)
            if found is None:
                continue
            assert found.size_bytes == sum(layer_bytes[: found.layers])
            assert start <= found.offset_bytes
            assert found.end_bytes <= start + size
            places.append((found.offset_bytes, found.end_bytes))
        places.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))


def test_the_longest_kept_leaves_first() -> None:
    residents = ResidentLayers(100, 110)
    for model in ("a", "b", "c"):
        residents.keep(model, [2, 2, 2, 2])
    assert [model for model in "abcd" if residents.find(model)] == ["b", "c"]
    residents.keep("b", [2, 2, 2, 2])
    residents.keep("d", [2, 2, 2, 2])
    assert [model for model in "abcd" if residents.find(model)] == ["b", "d"]
