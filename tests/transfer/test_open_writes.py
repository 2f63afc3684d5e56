"""Writes that cannot be called back, and what memory is given to meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.transfer.memory.arena import ArenaError
from livescale.transfer.memory.model_bytes import ModelBytes
from livescale.transfer.memory.open_writes import OpenWrites
from livescale.transfer.plane.store import Store
from livescale.values.types import LayerEntry, Manifest, WorkerRef

# Small, so that ranges meet.
MEMORY = 12


def _copy(number: int, offset: int, size: int) -> ModelBytes:
    """Of a model of its own, at that place."""
    layers = (LayerEntry(0, 0, size, (), f"{number}", f"{number}"),)
    return ModelBytes(Manifest(f"model-{number}", "{}", "float32", layers), 8, offset)


class _Memory:
    """Bytes know which model was written there last; reads write when they like."""

    def __init__(self) -> None:
        self.writes = OpenWrites()
        self.store = Store(WorkerRef(0), self.writes)
        self.copies: list[tuple[int, ModelBytes]] = []
        #: (number of the write, model, first byte, end)
        self.reads: list[tuple[int, int, int, int]] = []
        self._models = 0

    def hand_out(self, offset: int, size: int) -> None:
        self._models += 1
        held = _copy(self._models, offset, min(size, MEMORY - offset))
        is_free = not any(
            c.start_bytes < held.end_bytes and held.start_bytes < c.end_bytes
            for _, c in self.copies
        ) and not any(
            start < held.end_bytes and held.start_bytes < end for _, _, start, end in self.reads
        )
        try:
            self.store.add(held)
        except ArenaError:
            assert not is_free, "nothing lies there and nothing is written there"
        else:
            assert is_free, "given to something else while it is held or written"
            self.copies.append((self._models, held))

    def read(self, at: int, offset: int, size: int) -> None:
        """A read for a copy begins, in one place once."""
        model, held = self.copies[at % len(self.copies)]
        start = held.start_bytes + offset % (held.end_bytes - held.start_bytes)
        end = min(start + size, held.end_bytes)
        is_twice = any(s < end and start < e for _, _, s, e in self.reads)
        if is_twice:
            with pytest.raises(ArenaError):
                self.writes.begin(start, end - start)
        else:
            self.reads.append((self.writes.begin(start, end - start), model, start, end))

    def write(self, at: int) -> None:
        """A read that is under way writes, whatever has become of what it was for."""
        _, model, start, end = self.reads[at % len(self.reads)]
        others = [m for m, c in self.copies if c.start_bytes < end and start < c.end_bytes]
        assert others in ([], [model]), f"model {model} is written into {others}"

    def end(self, at: int) -> None:
        self.write(at)
        number, *_ = self.reads.pop(at % len(self.reads))
        self.writes.end(number)

    def abort(self, at: int) -> None:
        _, held = self.copies.pop(at % len(self.copies))
        self.store.remove(held, "aborted")


PLACE = st.integers(0, MEMORY - 1)
SIZE = st.integers(1, MEMORY // 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hand_out"), PLACE, SIZE),
        st.tuples(st.just("read"), PLACE, PLACE, SIZE),
        st.tuples(st.just("write"), PLACE),
        st.tuples(st.just("end"), PLACE),
        st.tuples(st.just("abort"), PLACE),
    ),
    min_size=6,
    max_size=40,
)


@given(STEPS)
def test_no_write_lands_in_what_was_given_to_another_model(steps: list[tuple[str, int]]) -> None:
    memory = _Memory()
    for name, *numbers in steps:
        is_possible = {"hand_out": True, "read": memory.copies, "abort": memory.copies}
        if is_possible.get(name, memory.reads):
            getattr(memory, name)(*numbers)
    # All comes back when the reads have ended.
    while memory.copies:
        memory.abort(0)
    while memory.reads:
        memory.end(0)
    memory.hand_out(0, MEMORY)
    assert memory.copies


@given(st.lists(st.tuples(PLACE, SIZE), max_size=8), PLACE, SIZE)
def test_what_is_still_written_is_told_exactly(
    wanted: list[tuple[int, int]], offset: int, size: int
) -> None:
    writes = OpenWrites()
    begun: list[tuple[int, int, int]] = []
    for at, length in wanted:
        if writes.ranges(at, length):
            with pytest.raises(ArenaError, match="may still be written"):
                writes.check_closed(at, length)
        else:
            begun.append((writes.begin(at, length), at, length))
    touching = sorted((at, n) for _, at, n in begun if at < offset + size and offset < at + n)
    assert writes.ranges(offset, size) == tuple(touching)
    assert writes.wait_closed(offset, size, 0.0) == (not touching)
    told: list[bool] = []
    writes.when_closed(offset, size, lambda: told.append(True))
    for number, *_ in begun:
        assert told == ([] if writes.ranges(offset, size) else [True])
        writes.end(number)
    assert told == [True]
    writes.check_closed(0, MEMORY)
