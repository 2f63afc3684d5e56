import gc
import os

import pytest
from transfer_world import open_descriptors, write_model

from livescale.transfer.memory.arena import Arena, ArenaError
from livescale.values.types import LayerEntry, Manifest


def _manifest(*spans: tuple[int, int]) -> Manifest:
    layers = [LayerEntry(i, offset, size, (), "", "") for i, (offset, size) in enumerate(spans)]
    return Manifest("m", "{}", "float32", tuple(layers))


@pytest.mark.parametrize("size_bytes", [1, 4095, 4097, (2 << 20) + 5])
def test_views_are_writable_and_see_each_other(size_bytes: int) -> None:
    arena = Arena(size_bytes)
    arena.view(size_bytes - 1, 1)[0] = 7
    assert bytes(arena.view(0, size_bytes)) == bytes(size_bytes - 1) + b"\x07"
    arena.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, 101), (100, 1), (50, 51), (0, -1)])
def test_a_view_outside_the_arena_is_refused_with_both_sizes(offset: int, size: int) -> None:
    with pytest.raises(ArenaError, match=f"{size} bytes at offset {offset} .* 100 bytes"):
        Arena(100).view(offset, size)


def test_a_model_that_does_not_fit_is_refused_with_both_sizes() -> None:
    manifest = write_model(Arena(1000), [300, 400])
    Arena(manifest.size_bytes).check_fits(manifest)
    with pytest.raises(ArenaError, match=f"needs {manifest.size_bytes} .* has 719"):
        Arena(719).check_fits(manifest)


@pytest.mark.parametrize(
    "manifest",
    [
        _manifest((0, 10), (9, 10)),
        _manifest((10, 10), (0, 10)),
        _manifest((-1, 10)),
        _manifest((0, -1)),
    ],
)
def test_a_manifest_with_layers_out_of_order_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ArenaError, match="layer"):
        Arena(100).check_fits(manifest)


def test_a_model_fits_at_an_offset_or_not() -> None:
    manifest = write_model(Arena(1000), [300, 400])
    Arena(manifest.size_bytes + 100).check_fits(manifest, 100)
    with pytest.raises(ArenaError, match="at offset 101, the worker has"):
        Arena(manifest.size_bytes + 100).check_fits(manifest, 101)
    with pytest.raises(ArenaError, match="offset -1"):
        Arena(manifest.size_bytes).check_fits(manifest, -1)


def test_the_memory_can_be_read_through_its_descriptor() -> None:
    with Arena(10_000) as arena:
        arena.view(5000, 3)[:] = b"abc"
        assert os.pread(arena.fd, 3, 5000) == b"abc"


def test_two_arenas_of_one_memfd_are_one_memory() -> None:
    with Arena(10_000) as first, Arena(10_000, memfd=os.dup(first.fd)) as second:
        second.view(5000, 3)[:] = b"abc"
        assert bytes(first.view(5000, 3)) == b"abc"
        with pytest.raises(ArenaError, match="10001 bytes"):
            Arena(10_001, memfd=os.dup(first.fd))


def test_a_dropped_arena_leaves_no_descriptor() -> None:
    gc.collect()  # what other tests have left
    before = open_descriptors("/memfd")
    Arena(100)
    assert open_descriptors("/memfd") == before


def test_a_manifest_without_layers_is_refused() -> None:
    with pytest.raises(ArenaError, match="no layers"):
        Arena(100).check_fits(_manifest())


def test_a_closed_arena_gives_no_view_and_leaves_old_views_alone() -> None:
    arena = Arena(100)
    view = arena.view(0, 100)
    array = memoryview(view)
    arena.close()
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.view(0, 1)
    array[0] = 1
    assert view[0] == 1


def test_memory_that_is_touched_late_is_taken_and_given_back() -> None:
    kept, late = 1 << 20, 8 << 20
    with Arena(kept + late, touched_bytes=kept) as arena:
        before = held_bytes(arena)
        assert kept <= before < kept + late
        arena.touch(kept, late)
        assert held_bytes(arena) == kept + late
        arena.view(kept, late)[:] = b"x" * late
        arena.give_back(0, kept + late)
        assert held_bytes(arena) == before, "what was touched at the start stays"
        with pytest.raises(ArenaError, match=r"free\. Lower arena_bytes"):
            arena.touch(0, 1 << 50)


def held_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512
