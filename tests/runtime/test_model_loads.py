"""The sums that are shown of all instances of a model, while instances come and go."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.fleet import Instance
from livescale.messages.events import InstanceReported
from livescale.runtime.model_loads import ModelLoads
from livescale.types import WorkerRef

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
    on_worker: dict[int, Instance] = {}
    counted: dict[int, int] = {}
    expected = dict.fromkeys(MODELS, 0)
    for worker, model, added, used, is_released in story:
        if worker not in on_worker:
            on_worker[worker] = Instance(next(numbers), model, (WorkerRef(worker),), 1, attempt=1)
        instance = on_worker[worker]
        counted[instance.id] = counted.get(instance.id, 0) + added
        expected[instance.model] += added
        instance.kv_blocks_used, instance.kv_blocks = used, BLOCKS
        living = {known.id: known for known in on_worker.values()}
        news = report(instance.id, counted[instance.id])
        loads.absorb(news, living)
        loads.absorb(news, living)
        loads.absorb(msgspec.structs.replace(news, attempt=0, preemptions=999), living)
        if is_released:
            del on_worker[worker], living[instance.id]
            loads.absorb(msgspec.structs.replace(news, preemptions=999), living)
        for name, shown in loads.shown(living).items():
            mine = [known for known in living.values() if known.model == name]
            assert shown.preemptions == expected[name]
            assert shown.prefix_lookup_tokens == 3 * expected[name]
            assert shown.reused_tokens == 2 * expected[name]
            assert shown.handovers == 4 * expected[name]
            assert shown.handover_bytes == 5 * expected[name]
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
                ranks = tuple(WorkerRef(10 * place + rank) for rank in range(1 + place % 2))
                instances[100 * number + place] = Instance(place, model, ranks, 1)
                expected[model] += held_ns * len(ranks)
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
        *(instance, 1, (), 0, 0, 0, BLOCKS, 0),
        preemptions=count,
        prefix_lookup_tokens=3 * count,
        reused_tokens=2 * count,
        handovers=4 * count,
        handover_bytes=5 * count,
    )
