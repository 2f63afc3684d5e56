"""Several threads read parts of tensors into place: the bytes, the order and the errors of one."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.engine.base.errors import ModelError
from livescale.engine.files import checkpoint
from livescale.engine.files.checkpoint import StoredTensor, TensorReader
from livescale.engine.files.model_files import read_layers, read_manifest


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reads")]


@given(
    content=st.binary(max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    part_bytes=st.integers(1, 64),
    threads=st.integers(1, 4),
)
def test_parts_of_any_size_make_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    cuts: list[int],
    part_bytes: int,
    threads: int,
) -> None:
    path = tmp_path_factory.mktemp("parts") / "file"
    path.write_bytes(content)
    ends = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    tensors = [
        StoredTensor(f"t{start}", path, "F32", (), start, stop - start)
        for start, stop in pairwise(ends)
    ]
    place = bytearray(len(content))
    with pytest.MonkeyPatch.context() as patch, TensorReader(threads) as reader:
        patch.setattr(checkpoint, "PART_BYTES", part_bytes)
        reads = [
            (t, memoryview(place)[t.offset_bytes : t.offset_bytes + t.size_bytes]) for t in tensors
        ]
        # What follows the last part sees all of them.
        assert reader.start(reads, lambda: bytes(place)).result() == content
    assert not reading_threads()


def test_a_file_that_ends_early_is_told_once_and_nothing_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 10)
    path = tmp_path / "file"
    path.write_bytes(bytes(25))
    tensor = StoredTensor("t", path, "F32", (), 0, 100)
    missing = StoredTensor("u", tmp_path / "none", "F32", (), 0, 4)
    with TensorReader() as reader:
        future = reader.start([(tensor, memoryview(bytearray(100)))], pytest.fail)
        with pytest.raises(ModelError, match=r"file ends inside t: read \d+ of its 100 bytes"):
            future.result()
        future = reader.start([(missing, memoryview(bytearray(4)))], pytest.fail)
        with pytest.raises(ModelError, match="none cannot be opened"):
            future.result()


def test_what_follows_may_fail(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ModelError("no")

    path = tmp_path / "file"
    path.write_bytes(bytes(4))
    tensor = StoredTensor("t", path, "F32", (), 0, 4)
    with TensorReader() as reader:
        for reads in ([(tensor, memoryview(bytearray(4)))], []):
            with pytest.raises(ModelError, match="no"):
                reader.start(reads, refuse).result()


def test_only_some_layers_are_read_and_the_rest_is_left_alone(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model, "m")
    whole, some = bytearray(manifest.size_bytes), bytearray(manifest.size_bytes)
    count = len(manifest.layers)
    assert list(read_layers(tiny_model, manifest, memoryview(whole))) == list(range(count))
    wanted = (1, count - 1)
    assert list(read_layers(tiny_model, manifest, memoryview(some), wanted)) == list(wanted)
    for entry in manifest.layers:
        place = slice(entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
        expected = whole[place] if entry.layer in wanted else bytes(entry.size_bytes)
        assert some[place] == expected


def test_who_stops_early_leaves_no_thread(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model, "m")
    place = memoryview(bytearray(manifest.size_bytes))
    layers = read_layers(tiny_model, manifest, place)
    assert next(layers) == 0
    assert reading_threads()
    layers.close()
    assert not reading_threads()
