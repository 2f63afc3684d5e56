"""Key stages in host memory: 85 % of it, least recently used first, never the last copy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.control.policy.placement import Discard, HostRoom, Keep, ModelCopies, suggest
from livescale.control.stages.key_stages import KeyStage
from livescale.control.state.stage_schedule import StageSchedule
from livescale.values.copy_strategies import KeyStageCopies, keeps_last
from livescale.values.types import WorkerRef, agent_ref

PERCENT = 85
KEY = KeyStageCopies()
A = [agent_ref(number) for number in range(3)]


def stage(
    name: str,
    size: int,
    *,
    copies: dict[WorkerRef, int] | None = None,
    given_at: dict[WorkerRef, int] | None = None,
    key: str = "",
    is_on_devices: bool = True,
    needs_copy: bool = False,
) -> ModelCopies:
    copies = copies or {}
    return ModelCopies(
        model=name,
        size_bytes=size,
        is_on_devices=is_on_devices,
        needs_copy=needs_copy,
        is_leaving=False,
        agents=tuple(copies),
        used_ns=copies,
        has_copy=True,
        key_reason=key,
        given_ns=given_at or {},
    )


times = st.dictionaries(st.sampled_from(A), st.integers(0, 20), max_size=3)
stages = st.lists(
    st.builds(
        lambda size, copies, given_at, key, held: stage(
            "",
            size,
            copies=copies,
            given_at=given_at,
            key=key,
            is_on_devices=held > 0,
            needs_copy=held == 1,
        ),
        st.integers(1, 60),
        times,
        times,
        st.sampled_from(["", "over_target", "longest_queue"]),
        st.integers(0, 3),
    ),
    max_size=6,
)


def named(models: list[ModelCopies]) -> list[ModelCopies]:
    return [
        ModelCopies(
            f"m/{n}",
            m.size_bytes,
            m.is_on_devices,
            m.needs_copy,
            False,
            m.agents,
            m.used_ns,
            m.has_copy,
            m.key_reason,
            m.given_ns,
        )
        for n, m in enumerate(models)
    ]


def rooms_of(models: list[ModelCopies]) -> list[HostRoom]:
    """Hosts of 100 bytes, or of what their copies take if that is more."""
    rooms = []
    for agent in A:
        used = sum(m.size_bytes for m in models if agent in m.agents)
        memory = max(100, used)
        rooms.append(HostRoom(agent, memory - used, memory_bytes=memory))
    return rooms


@given(drawn=stages)
def test_copies_of_key_stages_leave_memory_free_and_no_last_copy_goes(
    drawn: list[ModelCopies],
) -> None:
    models = named(drawn)
    rooms = rooms_of(models)
    memory = {room.agent: room.memory_bytes for room in rooms}
    used = {room.agent: room.memory_bytes - room.free_bytes for room in rooms}
    of = {m.model: m for m in models}
    left = {m.model: {*m.agents} for m in models}
    for one in suggest(KEY, 99, models, rooms):
        model = of[one.model]
        assert one.reason
        if isinstance(one, Discard):
            left[one.model].remove(one.agent)
            continue
        assert one.agent not in model.agents, "there is one already"
        # What goes takes memory until it is gone.
        used[one.agent] += model.size_bytes
        assert used[one.agent] <= memory[one.agent]
        if one.reason.startswith("key stage"):
            assert model.key_reason
            assert one.agent in model.given_ns
            assert used[one.agent] * 100 <= memory[one.agent] * PERCENT
        else:
            assert model.needs_copy or not model.is_on_devices
            assert not model.agents
    for name, hosts in left.items():
        assert hosts or not of[name].agents or (of[name].is_on_devices and not of[name].needs_copy)


@given(drawn=stages)
def test_what_is_suggested_comes_to_rest(drawn: list[ModelCopies]) -> None:
    """No two copies drive each other out for ever."""
    models = named(drawn)
    for now_ns in range(100, 130):
        found = suggest(KEY, now_ns, models, rooms_of(models))
        if not found:
            return
        models = [_after(model, found, now_ns) for model in models]
    raise AssertionError(f"still {found}")


def _after(model: ModelCopies, found: list[Keep | Discard], now_ns: int) -> ModelCopies:
    copies = dict(model.used_ns)
    for one in found:
        if one.model == model.model and isinstance(one, Keep):
            copies[one.agent] = now_ns
        elif one.model == model.model:
            del copies[one.agent]
    return stage(
        model.model,
        model.size_bytes,
        copies=copies,
        given_at=model.given_ns,
        key=model.key_reason,
        is_on_devices=model.is_on_devices,
        needs_copy=model.needs_copy,
    )


def room(free: int, memory: int = 100, agent: WorkerRef = A[0]) -> HostRoom:
    return HostRoom(agent, free, memory_bytes=memory)


def test_a_host_keeps_the_key_stages_it_was_given() -> None:
    key = stage("m/1", 40, given_at={A[0]: 5}, key="over_target")
    other = stage("m/0", 10, given_at={A[0]: 6})
    found = suggest(KEY, 9, [other, key], [room(100), room(100, agent=A[1])])
    assert found == [Keep("m/1", A[0], "key stage: over_target")]


def test_the_copy_stays_when_the_stage_is_key_no_longer_and_its_instance_is_gone() -> None:
    assert suggest(KEY, 10**12, [stage("m/1", 40, copies={A[0]: 5})], [room(60)]) == []


def test_the_least_recently_used_one_goes_when_more_than_85_percent_would_be_taken() -> None:
    old, new = stage("m/0", 40, copies={A[0]: 5}), stage("m/1", 40, copies={A[0]: 7})
    key = stage("m/2", 40, given_at={A[0]: 9}, key="longest_queue")
    assert suggest(KEY, 9, [old, new, key], [room(20)]) == [
        Discard("m/0", A[0], "least recently used")
    ]
    # Its memory is taken until it is gone.
    assert suggest(KEY, 9, [new, key], [HostRoom(A[0], 20, 40, memory_bytes=100)]) == []
    assert suggest(KEY, 9, [new, key], [room(60)]) == [
        Keep("m/2", A[0], "key stage: longest_queue")
    ]


def test_a_stage_that_was_given_earlier_drives_nothing_out() -> None:
    there = stage("m/0", 60, copies={A[0]: 9})
    key = stage("m/1", 60, given_at={A[0]: 5}, key="over_target")
    assert suggest(KEY, 9, [there, key], [room(40)]) == []


def test_a_last_copy_goes_before_key_stages_and_may_take_all_memory() -> None:
    key = stage("m/0", 60, copies={A[0]: 9}, key="over_target")
    last = stage("m/1", 95, needs_copy=True)
    assert suggest(KEY, 9, [key, last], [room(40)]) == [Discard("m/0", A[0], "least recently used")]
    assert suggest(KEY, 9, [last], [room(100)]) == [
        Keep("m/1", A[0], "restored before the last device copy goes")
    ]
    kept = stage("m/1", 95, copies={A[0]: 9}, is_on_devices=False)
    assert suggest(KEY, 9, [kept, stage("m/2", 5, given_at={A[0]: 9}, key="x")], [room(5)]) == []
    assert keeps_last(KEY)


def test_the_schedule_knows_key_stages_for_as_long_as_they_are_and_hosts_while_they_live() -> None:
    schedule = StageSchedule()
    schedule.mark(0, "m/1", KeyStage("over_target", 10))
    seen = schedule.version
    assert schedule.key_reason(9, "m/1") == "over_target"
    assert schedule.key_reason(10, "m/1") == ""
    schedule.mark(5, "m/1", KeyStage("longest_queue", 15))
    assert schedule.version == seen, "it is key as before"
    schedule.mark(20, "m/1", KeyStage("longest_queue", 30))
    assert schedule.version > seen, "it was not meanwhile"
    schedule.given("m/1", A[0], 7)
    assert (schedule.given_ns("m/1", A[0]), schedule.given_ns("m/1", A[1])) == (7, 0)
    schedule.lose(A[0])
    assert schedule.given_ns("m/1", A[0]) == 0
