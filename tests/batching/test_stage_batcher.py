"""Leaders and members of pipelines that are told of changes at different times: members keep blocks
for those that want them, and for no others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.contract.live_messages import (
    Declined,
    Gone,
    Handover,
    KvWanted,
    LiveMessage,
    Offer,
    Parted,
    Promised,
    Pull,
)
from livescale.batching.lines.stage_batcher import StageBatcher
from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import Batcher, BatcherConfig
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.values.routes import Partner, Pipeline, TeamMember
from livescale.values.types import LayerSpan, SamplingParams, StageOf, WorkerRef

BLOCKS = 12
SPANS = (LayerSpan(0, 2), LayerSpan(2, 4))
LEADERS, MEMBERS = (1, 2), (3, 4)


class Line:
    """Two instances of each of two stages. What the controller orders, and what they tell each
    other, travels on wires of their own, each in order."""

    def __init__(self) -> None:
        config = BatcherConfig(BLOCKS, 4, 64, 16, growth_tokens=4)
        self.at: dict[int, StageBatcher] = {}
        for number in (*LEADERS, *MEMBERS):
            stage = StageOf("m", int(number in MEMBERS), 2, int(number in MEMBERS))
            batcher = Batcher(config, LayerSpan(0, 3))
            self.at[number] = StageBatcher(batcher, number, stage, LiveLimits(answer_ns=10**9))
            self.at[number].layers_arrived(3)
        #: (from, to) -> what is on its way; 0 is the controller
        self.wires: dict[tuple[int, int], list[object]] = {}
        self._numbers = itertools.count()

    def order(self, pipelines: list[Pipeline]) -> None:
        """Each instance is to be told of those that it is in."""
        for number in self.at:
            own = [p for p in pipelines if any(m.partner.instance == number for m in p.members)]
            self.wires.setdefault((0, number), []).append(own)

    def deliver(self, wire: tuple[int, int]) -> None:
        sender, to = wire
        what, peer = self.wires[wire].pop(0), WorkerRef(sender)
        if isinstance(what, list):
            self.at[to].follow(what)
        else:
            self.at[to].take_message(peer, what, 0)
        for number, one in self.at.items():
            while (run := one.next()) is not None:
                one.done(run, [[5]] * sum(s.samples for s in run.segments), 1000)
            for worker, message in one.take_outbox(0):
                self.wires.setdefault((number, worker.worker), []).append(message)
            one.validate()

    @property
    def busy(self) -> list[tuple[int, int]]:
        return [wire for wire, what in self.wires.items() if what]

    def rest(self) -> None:
        while self.busy:
            self.deliver(self.busy[0])


def pipeline(number: int, leader: int, members: list[int]) -> Pipeline:
    stages = ((leader,), members)
    ways = tuple(
        tuple(TeamMember(Partner(i, WorkerRef(i)), span) for i in stage)
        for stage, span in zip(stages, SPANS, strict=True)
    )
    return Pipeline(number, ways, 1)


def spec(name: str) -> SequenceSpec:
    return SequenceSpec(name, 1, (7, 8, 9), SamplingParams(4))


@given(st.lists(st.booleans(), max_size=8), st.data())
def test_members_that_come_and_go_work_for_who_wants_them(
    turns: list[bool], data: st.DataObject
) -> None:
    """Now and then one leader is there, which has both members, or only the other one's."""
    line = Line()
    line.order([pipeline(5, 1, [3]), pipeline(6, 2, [4])])
    for number, swaps in enumerate(turns):
        while line.busy and data.draw(st.booleans()):
            line.deliver(data.draw(st.sampled_from(line.busy)))
        alone = [4] if swaps else [3, 4]
        line.order([pipeline(5, 1, alone)])
        if data.draw(st.booleans()):
            line.order([pipeline(5, 1, [3]), pipeline(10 + number, 2, [4])])
    line.order([pipeline(5, 1, [4])])
    while line.busy:
        line.deliver(data.draw(st.sampled_from(line.busy)))
    line.at[1].add(spec("r"))
    assert line.at[1].take_returned() == []
    line.order([pipeline(5, 1, [4])])
    line.rest()
    assert line.at[1].requests() == [], "it went through the member"
    for number, one in line.at.items():
        assert one.kv_in_use == 0, number
        assert one.batcher.pool.used == (BLOCKS if number in (1, 4) else 0), number


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8), st.data())
def test_no_request_waits_for_a_way_that_is_there(
    turns: list[tuple[bool, bool]], data: st.DataObject
) -> None:
    """A member is exchanged for another one and back, while requests go through it or wait."""
    line, members = Line(), [3]
    line.order([pipeline(5, 1, members)])
    for number, (swaps, asks) in enumerate(turns):
        while line.busy and data.draw(st.booleans()):
            line.deliver(data.draw(st.sampled_from(line.busy)))
        members = [4] if swaps else [3]
        line.order([pipeline(5, 1, members)])
        if asks:
            line.at[1].add(spec(f"r{number}"))
    while line.busy:
        line.deliver(data.draw(st.sampled_from(line.busy)))
    line.order([pipeline(5, 1, members)])
    line.rest()
    assert line.at[1].requests() == []


def test_a_member_that_was_leaving_and_stays_after_all_takes_what_waited_meanwhile() -> None:
    """It was not told, as when a new controller has not met it yet: it grants no blocks anew."""
    line = Line()
    line.order([pipeline(5, 1, [3])])
    line.rest()
    line.at[1].add(spec("through it"))
    for member in (4, 3):
        line.wires[0, 1].append([pipeline(5, 1, [member])])
        line.deliver((0, 1))
        line.at[1].add(spec(f"while {member} is a member"))
    line.rest()
    assert line.at[1].requests() == []
    assert line.at[1].take_returned() == []


def test_a_request_that_the_quota_can_never_hold_goes_back_and_is_refused_then() -> None:
    """Before the quota comes, the leader does not know how long a request may be."""
    line = Line()
    line.order([pipeline(5, 1, [3])])
    line.deliver((0, 1))
    leader = line.at[1]
    # Twice the members' blocks, but for what one leader alone could hold.
    long = SequenceSpec("long", 1, (7,) * 40, SamplingParams(4))
    leader.add(long)
    leader.add(spec("short"))
    member = line.at[3] = StageBatcher(
        Batcher(BatcherConfig(BLOCKS // 2, 4, 64, 16), LayerSpan(0, 3)),
        3,
        StageOf("m", 1, 2, 1),
        LiveLimits(),
    )
    member.layers_arrived(3)
    line.deliver((0, 3))
    line.deliver((3, 1))
    assert leader.take_returned() == [("long", 1)]
    assert leader.requests() == [("short", 1)]
    with pytest.raises(ValueError, match="needs more KV than the 6 blocks"):
        leader.add(long)


def test_nothing_of_an_earlier_stay_is_found_again() -> None:
    """A prompt that begins as one before is computed anew where the member was away meanwhile."""
    line = Line()
    for members in ([3], [4], [3]):
        line.order([pipeline(5, 1, members)])
        line.rest()
        line.at[1].add(SequenceSpec(f"r{members}", 1, tuple(range(9)), SamplingParams(2)))
        line.order([pipeline(5, 1, members)])
        line.rest()
        assert line.at[1].requests() == []
    assert line.at[1].report().reused_tokens == 0


def test_blocks_of_a_pipeline_that_is_over_count_as_used() -> None:
    line = Line()
    line.order([pipeline(5, 1, [3])])
    line.rest()
    member = line.at[3]
    assert member.report().kv_blocks_used == member.kv_in_use == 0
    member.follow([pipeline(6, 1, [3])])
    assert member.report().kv_blocks_used == member.kv_in_use == BLOCKS
    # Where nothing else is to have them they are no load: the report would wake what drains.
    member.follow([])
    assert (member.report().running, member.report().kv_blocks_used) == (1, 0)
    assert member.kv_in_use == BLOCKS
    line.order([])
    line.rest()
    assert member.report().kv_blocks_used == member.kv_in_use == 0


def test_a_pipeline_that_another_instance_led_is_over() -> None:
    """The worker of its leader has another instance by now."""
    line = Line()
    line.order([pipeline(5, 1, [3])])
    line.deliver((0, 3))
    line.at[1] = StageBatcher(
        Batcher(BatcherConfig(BLOCKS, 4, 64, 16), LayerSpan(0, 3)),
        9,
        StageOf("m", 0, 2, 0),
        LiveLimits(),
    )
    line.wires.pop((0, 1))
    line.rest()
    assert line.at[3].batcher.pool.used == 0


KEY = BatchKey(7, 1)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (Offer(5, KEY, (3,), (9,)), Parted(7)),
        (Pull(KEY), Gone(KEY)),
        (KvWanted(KEY, 1), Gone(KEY)),
        (Promised(KEY), Declined(KEY)),
        (Handover(KEY, (SequenceSpec("r", 1, (1, 2), SamplingParams(8)),), 1), Declined(KEY)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_was_meant_for_the_instance_before_is_answered(
    message: LiveMessage, answer: LiveMessage
) -> None:
    """Its worker took batches over, and serves a stage of another model when they come."""
    member = Line().at[3]
    peer = WorkerRef(9)
    assert member.expected_tokens(peer, message) is None
    member.take_message(peer, message, 0)
    assert member.take_outbox(0) == [(peer, answer)]


def test_what_a_member_offered_before_its_leader_knew_of_it_is_void_once_it_was_refused() -> None:
    """It was told of a pipeline that its leader, which was told later, did not lead over it yet."""
    line = Line()
    line.order([pipeline(5, 1, [3])])
    line.rest()
    told = [pipeline(5, 1, [4])]
    for orders in (told, [], told):  # each time it offers its blocks, or asks whether all is over
        line.wires[0, 4].append(orders)
        line.deliver((0, 4))
    line.deliver((4, 1))
    line.wires[0, 4].append([])
    line.wires[0, 1].append(told)
    line.deliver((0, 1))
    while line.wires.get((4, 1)):
        line.deliver((4, 1))
    line.at[1].add(spec("r"))
    line.rest()
    assert line.at[1].requests() == [("r", 1)], "no member has granted anything yet"
    line.wires[0, 4].append(told)
    line.rest()
    assert line.at[1].requests() == []
