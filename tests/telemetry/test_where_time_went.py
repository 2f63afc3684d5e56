"""Device time by use and the waiting of slow requests, recounted by the nanosecond."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.clusters.topology import Device
from livescale.messages.commands import AnyCommand, Drain, Resume, StartHolding
from livescale.messages.events import (
    AnyEvent,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LiveStarted,
    MembersLeave,
    WorkerJoined,
    WorkerLost,
)
from livescale.telemetry.history.device_time import DeviceUse, device_stretches, device_time
from livescale.telemetry.history.reading import History, read_history
from livescale.telemetry.history.waiting import slow_requests
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty
from livescale.values.types import FromStorage, HoldingId, LayerSpan, Outcome, WorkerRef

WORKERS = 3
MODELS = ("a", "b")
DEVICE = Device("cpu", "host", "leaf", 1000, 1000)
NEXT = {
    "load": ("live", "whole", "fail", "lose"),
    "live": ("whole", "fail", "lose"),
    "whole": ("drain", "lose"),
    "drain": ("resume", "drop", "lose"),
    "resume": ("drain", "lose"),
}
FREE = ("load", "spare", "lose", "leave")
USES = {
    **{"load": DeviceUse.LOADING, "live": DeviceUse.LOADING, "whole": DeviceUse.SERVING},
    **{"drain": DeviceUse.DRAINING, "resume": DeviceUse.SERVING, "spare": DeviceUse.SPARE},
    **{"lose": DeviceUse.LOST, "leave": DeviceUse.LEFT, "free": DeviceUse.IDLE},
}

#: a worker, a choice of what happens there, a model, and the time until then
moves = st.lists(
    st.tuples(
        *(st.integers(0, WORKERS - 1), st.integers(0, 9), st.sampled_from(MODELS)),
        st.integers(0, 5),
    ),
    max_size=30,
)
#: a model, a prompt, when it was queued, how long it waited for its dispatch and then for its token
asked = st.lists(
    st.tuples(
        *(st.sampled_from(MODELS), st.integers(1, 9), st.integers(0, 60)),
        *(st.integers(0, 20), st.integers(0, 20)),
    ),
    max_size=12,
)


class Story:
    """Workers to which things happen, and what each did in every nanosecond."""

    def __init__(self, story: list[tuple[int, int, str, int]]) -> None:
        self.now_ns = 0
        self.lines: list[AnyLine] = []
        self.seconds: dict[int, list[tuple[DeviceUse, str]]] = {n: [] for n in range(WORKERS)}
        self._state = dict.fromkeys(range(WORKERS), ("free", ""))
        self._lives = dict.fromkeys(range(WORKERS), 0)
        self._numbers = 0
        self._held: dict[int, HoldingId] = {}
        self._tell(*(WorkerJoined(WorkerRef(n), DEVICE) for n in range(WORKERS)))
        for worker, choice, model, passed_ns in story:
            self._pass(passed_ns)
            self._happen(worker, choice, model)
        self._pass(3)
        self._tell()

    def _pass(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        for worker, (state, model) in self._state.items():
            self.seconds[worker] += [(USES[state], model)] * passed_ns

    def _tell(self, *said: AnyEvent | AnyCommand) -> None:
        received = tuple(item for item in said if isinstance(item, AnyEvent))
        ordered = tuple(item for item in said if isinstance(item, AnyCommand))
        self.lines.append(StepLine(self.now_ns, received, ordered, self.now_ns))

    def _happen(self, worker: int, choice: int, model: str) -> None:
        state, held_model = self._state[worker]
        ref = WorkerRef(worker, self._lives[worker])
        if state in ("lose", "leave"):
            self._lives[worker] += 1
            self._tell(WorkerJoined(WorkerRef(worker, self._lives[worker]), DEVICE))
            self._state[worker] = ("free", "")
            return
        able = FREE if state == "free" else NEXT.get(state, ("drop", "lose", "leave"))
        what = able[choice % len(able)]
        if what in ("load", "spare"):
            self._numbers += 1
            held = self._held[worker] = HoldingId(self._numbers, ref)
            feeds = (Feed(FromStorage(), (ChunkRange(0, 1),)),)
            duty = Duty(self._numbers, (ref,)) if what == "load" else None
            self._tell(StartHolding(held, model, LayerSpan(0, 1), feeds, 1, duty=duty))
            self._state[worker] = (what, model)
            return
        held = self._held.get(worker, HoldingId(0, ref))
        said: dict[str, AnyEvent | AnyCommand] = {
            "live": LiveStarted(held),
            "whole": HoldingCompleted(held, 1),
            "drain": Drain(held.plan),
            "resume": Resume(held.plan),
            "fail": HoldingFailed(held, ""),
            "drop": HoldingDropped(held),
            "lose": WorkerLost(ref, ""),
            "leave": WorkerLost(ref, ""),
        }
        if what == "leave":
            self._tell(MembersLeave((ref,)))
        self._tell(said[what])
        if what in ("fail", "drop"):
            self._state[worker] = ("free", "")
        else:
            self._state[worker] = (what, "" if what in ("lose", "leave") else held_model)

    def history(self, requests: list[tuple[str, int, int, int, int]] = []) -> History:  # noqa: B006
        lines = [
            RequestLine(
                *(f"r{n}", model, prompt, 9, queued, queued + before + after, Outcome.FINISHED, 1),
                dispatched_ns=queued + before,
                token_ns=(queued + before + after,),
            )
            for n, (model, prompt, queued, before, after) in enumerate(requests)
        ]
        return read_history([*self.lines, *lines])


@settings(max_examples=examples(400))
@given(moves, st.integers(0, 40), st.integers(0, 40))
def test_every_nanosecond_of_every_device_counts_once(
    story: list[tuple[int, int, str, int]], from_ns: int, span_ns: int
) -> None:
    told = Story(story)
    from_ns = min(from_ns, told.now_ns)
    to_ns = min(from_ns + span_ns, told.now_ns)
    spent = device_time(told.history(), from_ns, to_ns)
    assert spent.total_ns == WORKERS * (to_ns - from_ns)
    uses = [use for of in told.seconds.values() for use, _ in of[from_ns:to_ns]]
    found = (spent.load_ns, spent.serve_ns, spent.drain_ns)
    assert found == tuple(
        uses.count(u) for u in (DeviceUse.LOADING, DeviceUse.SERVING, DeviceUse.DRAINING)
    )
    assert (spent.spare_ns, spent.idle_ns) == (
        uses.count(DeviceUse.SPARE),
        uses.count(DeviceUse.IDLE),
    )
    assert (spent.lost_ns, spent.left_ns) == (
        uses.count(DeviceUse.LOST),
        uses.count(DeviceUse.LEFT),
    )
    for worker, stretches in device_stretches(told.history(), from_ns, to_ns).items():
        spelled = [s[2:] for s in stretches for _ in range(s.stop_ns - s.start_ns)]
        assert spelled == told.seconds[worker][from_ns:to_ns]
        assert all(one[2:] != other[2:] for one, other in pairwise(stretches))


@settings(max_examples=examples(400))
@given(moves, asked, st.integers(1, 100))
def test_the_time_of_slow_requests_is_that_of_their_nanoseconds(
    story: list[tuple[int, int, str, int]],
    requests: list[tuple[str, int, int, int, int]],
    percent: int,
) -> None:
    told = Story([*story, (0, 0, "a", 200)])
    history = told.history(requests)
    slow = slow_requests(history, percent)
    assert slow.requests == -(-len(requests) * percent // 100)
    parts = slow.loading_ns + slow.full_ns + slow.held_back_ns + slow.compute_ns
    assert parts == slow.ttft_ns
    times = sorted(((before + after), f"r{n}") for n, (*_, before, after) in enumerate(requests))
    chosen = times[len(times) - slow.requests :]
    assert slow.ttft_ns == sum(ttft for ttft, _ in chosen)
    counted = {"loading": 0, "full": 0, "held back": 0, "compute": 0}
    for ttft, name in chosen:
        model, prompt, queued, *_ = requests[int(name[1:])]
        own = min(ttft, alone_ns(requests, model, prompt))
        counted["compute"] += own
        for now_ns in range(queued, queued + ttft - own):
            counted[phase(told, model, now_ns)] += 1
    assert [slow.loading_ns, slow.full_ns, slow.held_back_ns, slow.compute_ns] == [
        *counted.values()
    ]


def alone_ns(requests: list[tuple[str, int, int, int, int]], model: str, prompt: int) -> int:
    """Of all requests of the model, the least that one says of the time of such a prompt."""
    return min(
        after if tokens >= prompt else -(-after * prompt // tokens)
        for its_model, tokens, _, _, after in requests
        if its_model == model
    )


def phase(told: Story, model: str, now_ns: int) -> str:
    doing = [of[now_ns] for of in told.seconds.values()]
    if (DeviceUse.LOADING, model) in doing:
        return "loading"
    free = [use for use, _ in doing if use in (DeviceUse.IDLE, DeviceUse.SPARE)]
    return "held back" if free or (DeviceUse.DRAINING, model) in doing else "full"


def test_without_requests_nothing_is_slow() -> None:
    assert slow_requests(Story([]).history()).requests == 0


def test_what_an_instance_leaves_on_other_ranks_is_spare() -> None:
    """Parameters of an instance that has ended because another rank is lost serve no request."""
    refs = (WorkerRef(0), WorkerRef(1))
    duty, feeds = Duty(1, refs), (Feed(FromStorage(), (ChunkRange(0, 1),)),)
    held = [HoldingId(1, ref) for ref in refs]
    orders = tuple(
        StartHolding(h, "a", LayerSpan(0, 1), feeds, 1, rank, duty=duty)
        for rank, h in enumerate(held)
    )
    history = read_history(
        [
            StepLine(0, (), orders, 0),
            StepLine(10, tuple(HoldingCompleted(h, 1) for h in held), (), 10),
            StepLine(30, (WorkerLost(refs[1], ""),), (), 30),
            StepLine(37, (HoldingDropped(held[0]),), (), 37),
            StepLine(40, (), (), 40),
        ]
    )
    spent = device_time(history, 0, 40)
    assert (spent.load_ns, spent.serve_ns, spent.spare_ns) == (20, 40, 7)
