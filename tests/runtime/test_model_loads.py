"""The sums that are shown of all instances of a model, while instances come and go."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.reports.status import InstanceSummary
from livescale.messages.events import InstanceReported, StageCounts
from livescale.runtime.controller_process.shown_status import ModelLoads
from livescale.values.types import InstanceState

MODELS = ("a", "b")
BLOCKS = 10

#: a worker, the model it gets if it has none, what it counted, blocks in use, is it released then
reports = st.lists(
    st.tuples(
        *(st.integers(0, 2), st.sampled_from(MODELS), st.integers(0, 9)),
        *(st.integers(0, BLOCKS), st.booleans()),
    ),
    max_size=30,
)
#: what the devices of a cluster hold (None: nothing), and for how long
holdings = st.lists(
    st.tuples(st.lists(st.sampled_from((*MODELS, "late", None)), max_size=4), st.integers(0, 99)),
    max_size=12,
)


@given(reports)
def test_counts_are_the_sum_over_all_instances_that_ever_were(
    story: list[tuple[int, str, int, int, bool]],
) -> None:
    """Each counts from zero and reports its sums; what comes late or twice counts once."""
    loads = ModelLoads(MODELS)
    numbers = itertools.count(1)
    on_worker: dict[int, int] = {}
    living: dict[int, InstanceSummary] = {}
    counted: dict[int, int] = {}
    expected = dict.fromkeys(MODELS, 0)
    for worker, model, added, used, is_released in story:
        if worker not in on_worker:
            on_worker[worker] = next(numbers)
        number = on_worker[worker]
        served = living[number].model if number in living else model
        living[number] = InstanceSummary(served, InstanceState.SERVING, 1, used, BLOCKS)
        counted[number] = counted.get(number, 0) + added
        expected[served] += added
        news = report(number, counted[number])
        loads.absorb(news, living)
        loads.absorb(news, living)
        if is_released:
            del on_worker[worker], living[number]
            loads.absorb(msgspec.structs.replace(news, preemptions=999), living)
        for name, shown in loads.shown(living).items():
            mine = [known for known in living.values() if known.model == name]
            assert shown.preemptions == expected[name]
            assert shown.prefix_lookup_tokens == 3 * expected[name]
            assert shown.reused_tokens == 2 * expected[name]
            assert shown.handovers == 4 * expected[name]
            assert shown.handover_bytes == 5 * expected[name]
            assert shown.visits == 6 * expected[name]
            assert shown.busy_ns == 7 * expected[name]
            assert shown.waited_ns == 8 * expected[name]
            assert shown.kv_blocks_used == sum(known.kv_blocks_used for known in mine)
            assert shown.kv_blocks == BLOCKS * len(mine)


@given(holdings)
def test_devices_are_counted_for_as_long_as_they_are_held(
    story: list[tuple[list[str | None], int]],
) -> None:
    """By a slow recount; an instance of two ranks holds two devices."""
    now_ns = 0
    loads = ModelLoads(MODELS, lambda: now_ns)
    expected = dict.fromkeys((*MODELS, "late"), 0)
    for number, (devices, held_ns) in enumerate(story):
        instances = {}
        for place, model in enumerate(devices):
            if model is not None:
                ranks = 1 + place % 2
                status = InstanceSummary(model, InstanceState.LOADING, ranks, 0, 0)
                instances[100 * number + place] = status
                expected[model] += held_ns * ranks
        loads.shown(instances)
        now_ns += held_ns
        assert {
            model: load.device_ns for model, load in loads.shown(instances).items()
        }.items() <= expected.items()
    assert sum(load.device_ns for load in loads.shown({}).values()) == sum(expected.values())
    loads.forget("a")
    assert "a" not in loads.shown({})


def report(instance: int, count: int) -> InstanceReported:
    return InstanceReported(
        instance=instance,
        started=(),
        running=0,
        queued_prefill_tokens=0,
        kv_blocks_used=0,
        kv_blocks=BLOCKS,
        emitted_tokens=0,
        preemptions=count,
        prefix_lookup_tokens=3 * count,
        reused_tokens=2 * count,
        handovers=4 * count,
        handover_bytes=5 * count,
        stage=StageCounts(done=6 * count, busy_ns=7 * count, waited_ns=8 * count),
    )
