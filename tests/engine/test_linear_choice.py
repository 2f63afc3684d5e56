"""The way of each linear follows the times, and times are taken once per machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from livescale.engine.products import linear_timing
from livescale.engine.products.linear_choice import (
    COPY_GAIN,
    COPY_GAIN_ONCE,
    ROWS,
    SHAPES,
    ChosenLinears,
    Kind,
    Timing,
    is_complete,
    kinds_of,
)

DTYPES = ("torch.float32", "torch.bfloat16")


def timings_of(us: dict[Kind, float], dtypes: tuple[str, ...] = DTYPES) -> tuple[Timing, ...]:
    """The same at every place."""
    return tuple(
        Timing(dtype, *shape, rows, us) for dtype in dtypes for shape in SHAPES for rows in ROWS
    )


US = st.floats(0.1, 1e6)
CELLS: Any = st.fixed_dictionaries({"compiled": US}, optional={"packed": US, "plain": US})


@given(st.lists(CELLS, min_size=len(ROWS), max_size=len(ROWS)), st.booleans())
def test_the_fastest_is_chosen_and_a_copy_only_where_it_gains(
    cells: list[dict[Kind, float]], may_copy: bool
) -> None:
    timings = [Timing("t", *SHAPES[0], rows, us) for rows, us in zip(ROWS, cells, strict=True)]
    kinds = kinds_of(timings, "t", SHAPES[0], may_copy)
    without = [min(us for kind, us in cell.items() if kind != "packed") for cell in cells]
    taken = [cell[kind] for kind, cell in zip(kinds, cells, strict=True)]
    pairs = zip(without, cells, strict=True)
    gains = [best / cell["packed"] for best, cell in pairs if "packed" in cell]
    mean = math.prod(gains) ** (1 / len(gains)) if gains else 0
    if may_copy and (mean > COPY_GAIN or max(gains, default=0) > COPY_GAIN_ONCE):
        assert taken == [min(cell.values()) for cell in cells]
    else:
        assert taken == without


@pytest.mark.parametrize(("plain_us", "kind"), [(1.04, "plain"), (1.06, "packed"), (0.9, "plain")])
def test_five_per_cent_are_not_worth_a_copy(plain_us: float, kind: Kind) -> None:
    timings = timings_of({"packed": 1.0, "plain": plain_us})
    assert set(kinds_of(timings, DTYPES[0], (4096, 64))) == {kind}


def test_shapes_are_taken_for_the_nearest_one() -> None:
    small, large = SHAPES
    timings = [
        Timing("t", *shape, rows, {kind: 1.0, "plain": 2.0})
        for shape, kind in ((small, "compiled"), (large, "packed"))
        for rows in ROWS
    ]
    assert set(kinds_of(timings, "t", (96, 64))) == {"compiled"}
    assert set(kinds_of(timings, "t", (14336, 4096))) == {"packed"}


@given(st.integers(1, 2000), st.integers(0, 2 ** len(ROWS) - 1))
def test_every_number_of_rows_is_computed(rows: int, bits: int) -> None:
    """Whatever is chosen for some numbers of rows, and something else for others."""
    choice: list[dict[Kind, float]] = [
        {"compiled": 1.0, "plain": 2.0} if bits >> n & 1 else {"compiled": 2.0, "plain": 1.0}
        for n in range(len(ROWS))
    ]
    timings = [
        Timing("torch.float32", *shape, count, us)
        for shape in SHAPES
        for count, us in zip(ROWS, choice, strict=True)
    ]
    member = nn.Linear(4, 3).requires_grad_(False)
    x = torch.randn(rows, 4)
    torch.testing.assert_close(ChosenLinears("auto", timings)([member])(x), member(x))


def test_incomplete_and_impossible_times_are_noticed() -> None:
    whole = timings_of({"compiled": 1.0})
    assert is_complete(whole, DTYPES)
    assert not is_complete(whole[1:], DTYPES)
    assert not is_complete((), DTYPES)
    assert not is_complete(timings_of({"packed": 1.0}), DTYPES)
    for us in (0.0, -1.0, math.inf, math.nan):
        assert not is_complete(timings_of({"compiled": us}), DTYPES)


# -- the file ------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process keeps its times, of which it knows none."""
    path = tmp_path / "cache" / linear_timing.FILE
    monkeypatch.setattr(linear_timing, "cache_folder", lambda: path.parent)
    monkeypatch.setattr(linear_timing, "_known", {})
    return path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would begin."""
    monkeypatch.setattr(linear_timing, "_known", {})


def test_times_are_taken_once_and_found_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_timing.known_timings() == ()
    taken = linear_timing.ensure_timings()
    assert is_complete(taken, DTYPES)
    forget(monkeypatch)
    before = file.read_bytes()
    assert linear_timing.known_timings() == taken == linear_timing.ensure_timings()
    assert file.read_bytes() == before
    monkeypatch.setattr(torch, "__version__", "of another time")
    assert linear_timing.known_timings() == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"KEY": []}',
        b'{"KEY": [{"dtype": "torch.float32", "width": 1}]}',
        b'{"KEY": [{"dtype": "d", "width": 1, "features": 1, "rows": 1, "us": {"other": 1}}]}',
        b"\xff\xfe",
    ],
)
def test_a_broken_file_is_no_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    file.parent.mkdir()
    file.write_bytes(content.replace(b"KEY", linear_timing.machine_key().encode()))
    assert linear_timing.known_timings() == ()
    kept = timings_of({"compiled": 1.0})
    monkeypatch.setattr(linear_timing, "measure", lambda: kept)
    assert linear_timing.ensure_timings() == kept
    forget(monkeypatch)
    assert linear_timing.known_timings() == kept


def test_other_machines_times_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory may be shared between machines."""
    file.parent.mkdir()
    other = {"another machine": timings_of({"plain": 2.0})}
    file.write_bytes(msgspec.json.encode(other))
    monkeypatch.setattr(linear_timing, "measure", lambda: timings_of({"compiled": 1.0}))
    linear_timing.ensure_timings()
    found = msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[Timing, ...]])
    assert found == other | {linear_timing.machine_key(): timings_of({"compiled": 1.0})}


def test_without_a_place_for_the_file_times_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_timing, "cache_folder", lambda: None)
    monkeypatch.setattr(linear_timing, "_known", {})
    monkeypatch.setattr(linear_timing, "measure", lambda: timings_of({"compiled": 1.0}))
    assert linear_timing.ensure_timings() == linear_timing.known_timings()


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_limits_of_instructions_are_another_machine() -> None:
    program = (
        "from livescale.engine.products.linear_timing import machine_key; print(machine_key())"
    )
    limits = ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"ATEN_CPU_CAPABILITY": "avx2"})
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | limit,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for limit in limits
    }
    assert len(keys) == len(limits)
