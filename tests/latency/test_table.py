"""Tables: they give back what was measured, rise, never draw logs out, and survive files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from works import are_steps_of_single_runs, larger, works

from livescale.clusters.profiles import (
    HEAD,
    AttentionPoint,
    LinearPoint,
    OpProfile,
    read_profile,
    write_profile,
)
from livescale.common.settings import ConfigError
from livescale.latency.curves import TimeCurve, TimeGrid
from livescale.latency.models import AnyLatency
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.latency.table import TableLatency
from livescale.latency.work import RunWork

SHAPE = PRESETS["qwen2.5-72b"]
TP = 4
HEADS = (SHAPE.heads // TP, SHAPE.kv_heads_of_rank(TP), SHAPE.head_dim)

times = st.integers(1, 10_000_000)
sizes = st.integers(1, 65_536)


@st.composite
def profiles(draw: st.DrawFn) -> OpProfile:
    """Measurements as noise would have them: nothing rises by itself."""
    linear = st.builds(
        LinearPoint,
        *(st.just("a100"), st.just(SHAPE.name), st.just(TP), sizes),
        st.dictionaries(st.sampled_from(["attn_pre_proj", "mlp_down_proj"]), times, min_size=1),
    )
    attention = st.builds(
        AttentionPoint,
        *(
            st.just("a100"),
            st.sampled_from(["prefill", "decode", "extend"]),
            st.integers(1, 512),
            sizes,
        ),
        *(st.just(HEADS[0]), st.just(HEADS[1]), st.just(HEADS[2]), times),
    )
    return OpProfile(
        tuple(draw(st.lists(linear, min_size=1, max_size=8))),
        tuple(draw(st.lists(attention, max_size=12))),
    )


@st.composite
def measured(draw: st.DrawFn) -> OpProfile:
    """A profile of one machine: the head was measured, too."""
    profile = draw(profiles())
    heads = st.builds(
        LinearPoint,
        *(st.just("a100"), st.just(SHAPE.name), st.just(TP), sizes),
        times.map(lambda ns: {HEAD: ns}),
    )
    linear = (*profile.linear, *draw(st.lists(heads, max_size=4)))
    return OpProfile(linear, profile.attention, layers=8)


tables = measured().map(TableLatency.measured)


# -- curves and grids -----------------------------------------------------------------------------


@given(st.dictionaries(sizes, times, min_size=1, max_size=12))
def test_a_rising_curve_goes_through_its_points(points: dict[int, int]) -> None:
    rising = dict(zip(sorted(points), sorted(points.values()), strict=True))
    curve = TimeCurve.of(rising.items())
    for size, ns in rising.items():
        assert curve.value(size) == pytest.approx(ns, rel=1e-9)
    assert curve.value(min(rising) / 2) == rising[min(rising)]


@given(
    st.dictionaries(st.tuples(st.integers(1, 64), sizes), times, min_size=1, max_size=12),
    st.tuples(st.floats(1, 200), st.floats(1, 1e6)),
    st.tuples(st.floats(0, 200), st.floats(0, 1e6)),
)
def test_grids_rise_by_batch_and_by_size(
    points: dict[tuple[int, int], int], at: tuple[float, float], more: tuple[float, float]
) -> None:
    grid = TimeGrid.of((batch, size, ns) for (batch, size), ns in points.items())
    least_ns = grid.value(*at)
    # Up to the last digit: neighbouring cells meet with a rounding of logs.
    assert grid.value(at[0] + more[0], at[1] + more[1]) >= least_ns * (1 - 1e-12)


def test_an_outlier_does_not_lift_what_is_beyond_it() -> None:
    curve = TimeCurve.of(
        [(1, 5_000), (2, 15_000), (4, 5_000), (8, 5_100), (16, 5_200), (32, 9_000)]
    )
    assert curve.value(32) == 9_000
    assert curve.value(16) < 7_000


def test_beyond_the_last_point_a_line() -> None:
    curve = TimeCurve.of([(1, 100), (1000, 1000), (2000, 3000)])
    assert curve.value(4000) == 3000 + 2000 * 2000 / 1000
    assert TimeCurve.of([(10, 50)]).value(40) == 200


@pytest.mark.parametrize(
    ("at", "ns"), [((), ()), ((1, 1), (5, 5)), ((1, 2), (5, 4)), ((1,), (0,)), ((1, 2), (5,))]
)
def test_curves_that_are_none_are_refused(at: tuple[int, ...], ns: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"curve|increase"):
        TimeCurve(at, ns)


# -- whole Runs -----------------------------------------------------------------------------------


@given(
    table=tables,
    decodes=st.integers(1, 512),
    context=st.integers(1, 32_768),
    steps=st.integers(0, 10),
)
def test_steps_take_as_long_as_their_runs(
    table: TableLatency, decodes: int, context: int, steps: int
) -> None:
    assert are_steps_of_single_runs(table, decodes, context, steps)


@pytest.mark.long
@given(
    table=tables,
    work=works(),
    tokens=st.integers(1, 4096),
    context=st.integers(1, 4096),
    decodes=st.integers(1, 64),
)
def test_more_work_is_never_faster(
    table: TableLatency, work: RunWork, tokens: int, context: int, decodes: int
) -> None:
    run_ns = table.run_ns(work)
    for more in larger(work, tokens, context, decodes):
        assert table.run_ns(more) >= run_ns * (1 - 1e-9) - 1, more


@pytest.mark.long
@given(table=tables, work=works())
def test_a_table_that_was_written_down_says_the_same(table: TableLatency, work: RunWork) -> None:
    written = msgspec.json.encode(table)
    again = msgspec.json.decode(written, type=AnyLatency)
    assert again == table
    assert msgspec.json.encode(again) == written
    assert again.run_ns(work) == table.run_ns(work)


@given(work=works())
def test_a_table_made_of_the_roofline_is_the_roofline(work: RunWork) -> None:
    """Inside its points, between them and beyond them."""
    roofline = RooflineLatency.of("a100", SHAPE, TP)
    tokens = [*(1 << n for n in range(8)), *(256 * n for n in range(1, 17))]
    linear = [
        LinearPoint("a100", SHAPE.name, TP, n, {"all": round(roofline.linear_layer_ns(n))})
        for n in tokens
    ]
    table = TableLatency.measured(OpProfile(tuple(linear), layers=1))
    linear_ns = roofline.linear_layer_ns(work.token_count)
    assert table.run_ns(work) == pytest.approx(linear_ns, rel=0.03)


def test_a_chunk_counts_as_a_prompt_with_as_many_pairs() -> None:
    points = [AttentionPoint("a100", "prefill", 1, n, *HEADS, n * n) for n in (64, 512, 4096)]
    linear = LinearPoint("a100", SHAPE.name, TP, 1, {"all": 1})
    table = TableLatency.measured(OpProfile((linear,), tuple(points), layers=1))
    # 300² + 2 · 300 · 350 pairs are as many as a prompt of 548 has.
    assert table.prefill_layer_ns(((300, 350),)) == pytest.approx(300_000, rel=1e-4)


def test_what_was_not_measured_is_said() -> None:
    head = LinearPoint("a100", SHAPE.name, TP, 1, {HEAD: 1})
    with pytest.raises(ValueError, match=r"no linear layers of qwen2\.5-72b with tp 4 on a100"):
        TableLatency.measured(OpProfile((head,), layers=4))
    two = tuple(LinearPoint("cpu", name, 1, 1, {"all": 1}) for name in ("a", "b"))
    with pytest.raises(ValueError, match="this one has 2"):
        TableLatency.measured(OpProfile(two, layers=4))


# -- files ----------------------------------------------------------------------------------------


@given(profile=profiles(), layers=st.none() | st.integers(1, 100))
def test_a_profile_that_was_written_is_read_back(
    profile: OpProfile, layers: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.csv"
    profile = OpProfile(profile.linear, profile.attention, layers)
    write_profile(path, profile)
    assert read_profile(path) == profile


LINEAR_HEADER = "gpu,model,tp,num_tokens,mlp_up_proj"
ATTENTION_HEADER = "gpu,kind,batch_size,ctx,num_heads,num_key_value_heads,head_dim,latency_ms"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((LINEAR_HEADER, "a100,m,1,0,0.5"), "line 2: num_tokens is '0', not a positive whole"),
        ((LINEAR_HEADER, "a100,m,1,8,fast"), "line 2: mlp_up_proj is 'fast', not a time"),
        ((LINEAR_HEADER, "a100,m,1,8,nan"), "line 2: mlp_up_proj is 'nan', not a time"),
        ((LINEAR_HEADER, "a100,m,1,8,-1"), "line 2: mlp_up_proj is '-1', not a time"),
        ((LINEAR_HEADER, "a100,,1,8,1"), "line 2: model is missing"),
        ((LINEAR_HEADER, "a100,m,1"), "line 2: not as many cells as there are columns"),
        ((LINEAR_HEADER, "a100,m,1,,1"), "line 2: neither num_tokens nor batch_size"),
        ((ATTENTION_HEADER, "a100,train,1,8,8,8,128,1"), "kind is 'train', not one of prefill"),
        ((ATTENTION_HEADER, "a100,decode,1,8,8,8,128,"), "line 2: latency_ms is missing"),
        (("gpu,model,tp,layers,num_tokens,a", "g,m,1,4,1,1", "g,m,1,5,2,1"), "layers differ: 4"),
    ],
)
def test_bad_files_are_refused_with_line_and_column(
    tmp_path: Path, lines: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "profile.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=words):
        read_profile(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a profile"):
        read_profile(tmp_path / "none.csv")
