"""ScaleTracker: what becomes one ScaleLine, and when it is finished."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.clusters.topology import Device
from livescale.messages.commands import (
    AmendHolding,
    AnyCommand,
    Dispatch,
    Drain,
    DropHolding,
    Paired,
    PlanMade,
    Resume,
    ScaleDecided,
    StartHolding,
)
from livescale.messages.events import (
    AnyEvent,
    BatchTaken,
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    InstanceReported,
    LayerArrived,
    LiveStarted,
    RequestArrived,
    RequestCancelled,
    WorkerJoined,
    WorkerLost,
)
from livescale.messages.scale_plan import PlannedLoad, ScalePlan
from livescale.telemetry.history.follower import Follower
from livescale.telemetry.record.record import ScaleLine
from livescale.telemetry.scale_events import ScaleTracker
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.routes import Duty, Partner
from livescale.values.types import FromStorage, FromWorker, HoldingId, LayerSpan, Role, WorkerRef

W0, W1 = WorkerRef(0), WorkerRef(1)
HELD = HoldingId(1, W0)
FEEDS = (Feed(FromStorage(), (ChunkRange(0, 10),)),)
PLAN = ScalePlan(1, "m", "chain", ((W0,),), (PlannedLoad(W0, FEEDS),), 10, 100, None)
UP = [
    ScaleDecided("m", Role.UNIFIED, 0, 1, "below_min", {}),
    PlanMade(PLAN, (2,)),
    StartHolding(HELD, "m", LayerSpan(0, 10), FEEDS, 10, duty=Duty(2, (W0,))),
]
DOWN = [ScaleDecided("m", Role.UNIFIED, 2, 1, "idle", {}), Drain(2)]


def reported(emitted: int) -> InstanceReported:
    return InstanceReported(2, (), 0, 0, 0, 10, emitted)


class Story:
    """Feeds a tracker, one step per nanosecond."""

    def __init__(self) -> None:
        self.follower = Follower()
        self.tracker = ScaleTracker()
        self.now_ns = 0

    def step(self, *items: AnyEvent | AnyCommand) -> list[ScaleLine]:
        self.now_ns += 1
        commands = [i for i in items if isinstance(i, AnyCommand)]
        events: Sequence[AnyEvent] = [i for i in items if isinstance(i, AnyEvent)]
        changes = self.follower.step(self.now_ns, events, commands)
        return self.tracker.observe(self.now_ns, changes, self.now_ns)


def test_a_scale_up_is_finished_by_its_first_token() -> None:
    story = Story()
    assert story.step(*UP) == []
    assert story.step(FirstByteArrived(HELD)) == []
    assert story.step(LayerArrived(HELD, 0, 1)) == []
    assert story.step(LayerArrived(HELD, 1, 2)) == []
    assert story.step(HoldingCompleted(HELD, 100), reported(0)) == []
    (line,) = story.step(reported(1))
    (load,) = line.loads
    assert (line.decided_ns, load.first_byte_ns, load.first_layer_ns) == (1, 2, 3)
    assert (load.loaded_ns, load.first_token_ns, load.failed) == (5, 6, None)
    assert (line.plan, line.strategy, line.routes) == (1, "chain", ("storage -> w0.0",))
    assert story.tracker.flush() == []


def test_a_live_instance_tells_how_it_worked_and_when_it_first_helped() -> None:
    story = Story()
    reason = "helps instance 7, sends no parameters on"
    paired = Paired(2, "zigzag", (Partner(7, W1),), reason)
    decided, planned, start = UP
    story.step(decided, planned, paired, start)
    story.step(LiveStarted(HELD))
    story.step(FirstByteArrived(HELD))
    story.step(LayerArrived(HELD, 0, 1))
    for _ in range(2):
        story.step(BatchTaken(7, W1, 2, (("r", 1, 1),), 1, 10, 100, 5))
    assert story.step(reported(1)) == [], "its load is not over"
    (line,) = story.step(HoldingCompleted(HELD, 100))
    (load,) = line.loads
    assert load.pairing == "zigzag: helps instance 7, sends no parameters on"
    assert (load.live_ns, load.first_byte_ns, load.first_layer_ns) == (2, 3, 4)
    assert (load.first_help_ns, load.first_token_ns, load.loaded_ns) == (5, 7, 8)


def test_a_failed_load_finishes_its_scale_up() -> None:
    story = Story()
    story.step(*UP)
    (line,) = story.step(HoldingFailed(HELD, "no disk"))
    assert line.loads[0].failed == "no disk"


def test_a_lost_worker_finishes_its_scale_up() -> None:
    story = Story()
    story.step(*UP)
    (line,) = story.step(WorkerLost(W0, "gone"))
    assert line.loads[0].failed == "worker lost: gone"


def test_a_release_before_the_first_token_finishes_the_scale_up() -> None:
    story = Story()
    story.step(*UP)
    story.step(HoldingCompleted(HELD, 100))
    assert story.step(*DOWN) == []
    (up,) = story.step(DropHolding(HELD, "scale_down"))
    assert up.loads[0].first_token_ns is None
    (down,) = story.step(HoldingDropped(HELD))
    assert down.released_ns == {2: 5}


def test_a_resumed_instance_finishes_the_scale_down_only() -> None:
    story = Story()
    story.step(*UP)
    story.step(HoldingCompleted(HELD, 100))
    story.step(*DOWN)
    finished = story.step(ScaleDecided("m", Role.UNIFIED, 1, 2, "token_rate", {}), Resume(2))
    assert [line.to_instances for line in finished] == [1, 2]
    (up,) = story.step(reported(1))
    assert up.loads[0].first_token_ns == 5


def test_a_scale_down_is_finished_when_its_worker_is_lost() -> None:
    story = Story()
    story.step(*UP)
    story.step(HoldingCompleted(HELD, 100), reported(1))
    story.step(*DOWN)
    (down,) = story.step(WorkerLost(W0, "gone"))
    assert down.released_ns == {}
    assert story.tracker.flush() == []


def test_the_next_incarnation_tells_of_a_loss_too() -> None:
    story = Story()
    story.step(*UP)
    device = Device("cpu", "h", "l", 1, 1)
    (line,) = story.step(WorkerJoined(WorkerRef(0, 1), device))
    assert line.loads[0].failed == "worker lost: w0.1 took its place"


def test_flush_hands_out_what_is_unfinished() -> None:
    story = Story()
    story.step(*UP)
    story.step(FirstByteArrived(HELD))
    (line,) = story.tracker.flush()
    assert line.loads[0].first_byte_ns == 2
    assert story.tracker.flush() == []


def arrived(request: str, model: str = "m") -> RequestArrived:
    return RequestArrived(request, model, 1, 1)


def test_what_woke_a_model_without_instances_is_told() -> None:
    story = Story()
    story.step(arrived("other", "n"), arrived("gone"), arrived("first"))
    story.step(RequestCancelled("gone"), arrived("second"), *UP)
    (line,) = story.step(HoldingFailed(HELD, "no disk"))
    assert (line.woken_by, line.asked_ns, line.decided_ns) == ("first", 1, 2)


def test_nobody_woke_a_model_whose_requests_all_run() -> None:
    story = Story()
    story.step(arrived("r"), Dispatch("r", 1, 7, W1))
    story.step(*UP)
    (line,) = story.tracker.flush()
    assert (line.woken_by, line.asked_ns) == (None, None)


def test_amendments_are_told_until_the_scale_up_is_finished() -> None:
    story = Story()
    story.step(*UP)
    halves = [ChunkRange(k, 10, 2) for k in range(2)]
    feeds = tuple(Feed(FromWorker(w), (h,)) for w, h in zip((W1, W0), halves, strict=True))
    story.step(AmendHolding(HELD, feeds), AmendHolding(HoldingId(99, W1), FEEDS))
    (line,) = story.step(HoldingCompleted(HELD, 100), reported(1))
    assert line.amendments == ("w0.0 from w1.0 + w0.0",)
    assert story.step(AmendHolding(HELD, FEEDS)) == []
