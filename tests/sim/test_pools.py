"""Pools are cut as configured, and searches over pools find what is there."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_plays import CLUSTER, MODEL, MS, S, cluster, made, play

from effort import examples
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.latency.work import RunWork
from livescale.load.traces import TraceRow
from livescale.report.run.usage import usage_by_model
from livescale.sim.pools.capacity import (
    CapacityError,
    PercentileBound,
    is_within,
    measure_capacity,
    parse_bounds,
    smallest_pool,
)
from livescale.sim.pools.configs import (
    MEMORY_PERCENT,
    RESERVE_BYTES,
    build_config,
    dollars_per_hour,
    first_devices,
    first_hosts,
    tokens_max,
)
from livescale.sim.pools.limits import PooledModel, PoolError
from livescale.sim.pools.runs import fit_rows
from livescale.sim.pools.systems import SYSTEMS, find_system
from livescale.telemetry.history.reading import read_history

# -- pools ----------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    st.integers(20, 200),
    st.lists(st.sampled_from(sorted(PRESETS)), min_size=1, max_size=3, unique=True),
    st.sampled_from([1, 2, 4]),
)
def test_a_device_holds_the_largest_models_and_kv_for_each(
    memory_gb: int, presets: list[str], tp_size: int
) -> None:
    models = [PooledModel(name, name, tp_size) for name in presets]
    ranks = [PRESETS[name].spec(tp_size) for name in presets]
    usable = memory_gb * 10**9 * MEMORY_PERCENT // 100 - RESERVE_BYTES
    largest = max(rank.size_bytes for rank in ranks)
    pool = made(memory=f"{memory_gb}GB", count=4)
    if largest + 16 * max(rank.kv_bytes_per_token for rank in ranks) > usable:
        words = rf"a rank has {largest / 1e9:.1f} GB.*the {memory_gb}\.0 GB of a device"
        with pytest.raises(PoolError, match=words):
            build_config(pool, models, SYSTEMS["livescale"])
        return
    config = build_config(pool, models, SYSTEMS["livescale"])
    device = config.device(0)
    # As many as there are, while KV has room for eight of the longest requests beside them.
    kv_bytes = 8 * max(rank.kv_bytes_per_token * rank.model_tokens_max for rank in ranks)
    held = [n for n in range(2, len(models) + 1) if usable - n * largest >= kv_bytes]
    assert device.arena_bytes == max(held, default=1) * largest
    assert device.arena_bytes + device.kv_bytes == usable
    for rank in ranks:
        blocks = config.batcher(rank, device).kv_blocks
        assert blocks >= 1
        assert blocks * 16 * rank.kv_bytes_per_token <= device.kv_bytes


def test_a_group_or_a_host_bounds_the_ranks_and_the_instances() -> None:
    pool = made(count=8)
    config = build_config(pool, [PooledModel("m", "mistral-24b", 4)], SYSTEMS["livescale"])
    assert config.controller.models[0].instances_max == 4
    with pytest.raises(PoolError, match=r"of 4 ranks fits into no group or host.*2 devices"):
        build_config(made(), [PooledModel("m", "mistral-24b", 4)], SYSTEMS["livescale"])


def test_what_is_not_known_is_said_by_name() -> None:
    with pytest.raises(PoolError, match="accelerator 'abacus'"):
        build_config(made(kind="abacus"), [MODEL], SYSTEMS["livescale"])
    with pytest.raises(PoolError, match=r"no model 'llama-3-8' .*'llama-3-8b'"):
        build_config(made(), [PooledModel("m", "llama-3-8")], SYSTEMS["livescale"])
    limited = PooledModel("m", "llama-3-8b", instances_min=3, instances_max=2)
    with pytest.raises(PoolError, match="3 instances at least, and at most 2"):
        build_config(made(), [limited], SYSTEMS["livescale"])
    with pytest.raises(PoolError, match=r"fixed:5 needs 5 devices for 1 models.*has 4"):
        build_config(made(), [MODEL], find_system("fixed:5"))
    mixed = CLUSTER + CLUSTER.replace("host{n}", "other{n}").replace("a100", "h100")[7:]
    with pytest.raises(PoolError, match="several kinds: a100, h100"):
        build_config(cluster(mixed), [MODEL], SYSTEMS["livescale"])


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 100)), min_size=1, max_size=4),
    st.sampled_from(["fixed-full", "fixed-half"]),
)
def test_fixed_devices_are_dealt_by_weight(asked: list[tuple[int, int]], name: str) -> None:
    models = [PooledModel(f"m{i}", "llama-2-7b", tp) for i, (tp, _) in enumerate(asked)]
    weights = {f"m{i}": weight for i, (_, weight) in enumerate(asked)}
    pool = made(count=8)
    budget = 16 * (SYSTEMS[name].fixed_percent or 0) // 100
    least = sum(tp for tp, _ in asked)
    policies = build_config(pool, models, SYSTEMS[name], weights).controller.models
    counts = [policy.instances_min for policy in policies]
    assert [policy.instances_max for policy in policies] == counts
    assert min(counts) >= 1
    used = sum(count * tp for count, (tp, _) in zip(counts, asked, strict=True))
    assert used <= max(budget, least)
    assert used + min(tp for tp, _ in asked) > budget, "what would fit is used"
    for one, (tp, weight) in zip(counts, asked, strict=True):
        for other, (other_tp, other_weight) in zip(counts, asked, strict=True):
            if other > 1 and tp <= other_tp:
                # Nobody has a second instance that somebody else, who fits, needed more.
                assert weight / tp / (one + 1) <= other_weight / other_tp / other + 1e-9


def test_the_authors_constants_hold_on_their_devices_only() -> None:
    on_a100 = build_config(made(), [MODEL], SYSTEMS["livescale"]).controller.models[0]
    assert on_a100.prefill_tokens_per_s == 15_000
    on_h100 = build_config(made(kind="h100"), [MODEL], SYSTEMS["livescale"]).controller.models[0]
    assert (on_h100.prefill_tokens_per_s, on_h100.kv_blocks) == (None, None)


def test_parts_of_a_cluster_keep_their_hosts_and_their_price() -> None:
    whole = cluster()
    assert dollars_per_hour(whole) == 21
    one = first_hosts(whole, 1)
    assert (len(one.topology.devices), list(one.refs)) == (2, ["host0", "host0/0", "host0/1"])
    assert dollars_per_hour(one) == 10.5
    three = first_devices(whole, 3)
    assert len(three.topology.devices) == 3
    assert dollars_per_hour(three) == 21
    assert dollars_per_hour(made()) is None


ROWS = st.lists(
    st.builds(TraceRow, st.integers(0, S), st.integers(1, 9_000), st.integers(1, 9_000))
)


@given(ROWS, st.integers(2, 8_192))
def test_rows_are_cut_to_what_an_instance_serves(rows: list[TraceRow], most: int) -> None:
    fitted, clipped = fit_rows(rows, most)
    assert [row.arrival_ns for row in fitted] == [row.arrival_ns for row in rows]
    assert all(row.input_tokens >= 1 and row.output_tokens >= 1 for row in fitted)
    assert all(row.input_tokens + row.output_tokens <= most for row in fitted)
    assert clipped == sum(a != b for a, b in zip(rows, fitted, strict=True))
    for row, cut in zip(rows, fitted, strict=True):
        if row.input_tokens + row.output_tokens <= most and row.output_tokens <= most // 2:
            assert cut == row


def test_the_longest_request_fits_and_a_longer_one_does_not() -> None:
    config = build_config(made(), [PooledModel("m", "llama-2-7b")], SYSTEMS["livescale"])
    assert tokens_max(config, "m") == 4096
    small = msgspec.structs.replace(config, kv_blocks=10)
    assert tokens_max(small, "m") == 160


def test_device_time_is_what_the_record_says() -> None:
    """Counted from the controller's counts, and from the orders and ends in the record."""
    for name in ("livescale", "serverlessllm", "fixed-half"):
        played = play(name)
        run = played.run
        usage = usage_by_model(read_history(played.lines), run.started_ns, run.ended_ns)["m"]
        assert abs(run.device_ns() - usage.device_ns) <= 10 * MS * (1 + len(played.loads))


# -- capacity -------------------------------------------------------------------------------------


def test_capacity_is_what_the_device_can_compute() -> None:
    """Prompts like clockwork and one token each: a device serves one after the other."""
    config = build_config(first_devices(cluster(), 1), (MODEL,), SYSTEMS["fixed-full"])
    rows = [TraceRow(n * S // 2, 2_000, 1) for n in range(41)]
    found = measure_capacity({"m": rows}, config, seed=0)
    prompt_ns = RooflineLatency.of("a100", PRESETS["llama-3-8b"]).run_ns(
        RunWork(((2_000, 0),), sampled=1)
    )
    limit = S / prompt_ns
    assert 0.8 * limit <= found.requests_per_s <= 1.15 * limit
    assert found.factor < found.factor_failed <= 1.021 * found.factor


def test_a_load_without_a_rate_has_no_capacity() -> None:
    config = build_config(cluster(), (MODEL,), SYSTEMS["fixed-full"])
    with pytest.raises(CapacityError, match="one moment"):
        measure_capacity({"m": [TraceRow(0, 10, 10)] * 5}, config, seed=0)


@given(st.integers(1, 300), st.integers(1, 301))
def test_the_smallest_pool_is_found_in_few_trials(largest: int, least: int) -> None:
    search = smallest_pool(largest, lambda size: size >= least)
    assert search.answer == (least if least <= largest else None)
    assert search.is_monotone
    assert len(search.tried) <= largest.bit_length() + 5


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_an_answer_will_do_and_its_smaller_neighbour_will_not(does: list[bool]) -> None:
    search = smallest_pool(len(does), lambda size: does[size - 1])
    assert all(search.tried[size] == does[size - 1] for size in search.tried)
    assert (search.answer is None) == (not does[-1])
    if search.answer is not None:
        assert does[search.answer - 1]
        assert search.answer == 1 or not does[search.answer - 2]
        if search.answer < len(does) and not does[search.answer]:
            assert not search.is_monotone


BOUNDS = st.lists(
    st.tuples(st.sampled_from(["ttft", "tbt"]), st.integers(1, 100), st.integers(1, 10**6)),
    min_size=1,
    max_size=4,
    unique_by=lambda bound: bound[:2],
)


@given(BOUNDS)
def test_bounds_are_read_as_they_are_written(bounds: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{metric}_p{percent}={us}us" for metric, percent, us in bounds)
    read = parse_bounds(text)
    assert read == tuple(PercentileBound(metric, p, us * 1_000) for metric, p, us in bounds)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft_p99=450", "'ttft_p99=450' is no bound"),
        ("ttft=450ms", "'ttft=450ms' is no bound"),
        ("ttft_p0=1s", "a percentile is 1 to 100"),
        ("ttft_p101=1s", "a percentile is 1 to 100"),
        ("e2e_p99=1s", "'e2e_p99=1s' is no bound"),
        ("tbt_p50=1ms,tbt_p50=2ms", "tbt_p50 is bounded twice"),
    ],
)
def test_what_is_no_bound_is_said(text: str, words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        parse_bounds(text)


def test_a_run_is_within_bounds_that_it_meets() -> None:
    run = play("fixed-full").run
    lines = run.result.requests
    slowest_ns = max(line.token_ns[0] - line.queued_ns for line in lines)
    assert is_within(run, (PercentileBound("ttft", 100, slowest_ns),))
    assert not is_within(run, (PercentileBound("ttft", 100, slowest_ns - 1),))
    assert not is_within(run, (PercentileBound("tbt", 99, 1),))
