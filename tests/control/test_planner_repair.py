"""Repair: what a lost sender owed comes from elsewhere, and nobody waits for himself."""

from __future__ import annotations

from clusters import H, W, copies, rails, request, singles
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.control.multicast.planner import STRATEGIES, make_plan
from livescale.control.multicast.repair import Ways, nearest, repair
from livescale.values.chunks import ChunkRange, Feed
from livescale.values.types import FromStorage, FromWorker, WorkerRef

FeedsOf = dict[WorkerRef, tuple[Feed, ...]]
ALL = (ChunkRange(0, 24),)


def whole(upstream: WorkerRef) -> tuple[Feed, ...]:
    return (Feed(FromWorker(upstream), ALL),)


def readers_of(feeds_of: FeedsOf, lost: WorkerRef) -> list[WorkerRef]:
    return [
        receiver
        for receiver, feeds in feeds_of.items()
        if any(feed.upstream == FromWorker(lost) for feed in feeds)
    ]


def check_sound(feeds_of: FeedsOf, holders: list[WorkerRef], chunks: int = 24) -> None:
    """Every chunk of every receiver comes, over living members, from a holder or storage."""
    for receiver in feeds_of:
        for chunk in range(chunks):
            trail = [receiver]
            while trail[-1] not in holders:
                assert trail[-1] in feeds_of, f"{trail} ends at somebody who is gone"
                feed = next(f for f in feeds_of[trail[-1]] if any(chunk in p for p in f.chunks))
                if isinstance(feed.upstream, FromStorage):
                    break
                assert feed.upstream.worker not in trail, f"chunk {chunk} waits in a circle"
                trail.append(feed.upstream.worker)


def test_a_chain_closes_over_a_dead_member() -> None:
    feeds_of = {W[1]: whole(W[0]), W[2]: whole(W[1]), W[3]: whole(W[2])}
    assert repair(feeds_of, W[2], [W[3]], Ways(singles(4), [W[0]])) == {W[3]: whole(W[1])}


def test_a_dead_source_is_replaced_by_the_nearest_idle_copy() -> None:
    feeds_of = {W[5]: whole(W[0]), W[6]: whole(W[5])}
    topology = rails(3, 4)
    holders = [W[0], W[8], W[6], W[9], W[7]]
    assert repair(feeds_of, W[0], [W[5]], Ways(topology, holders)) == {W[5]: whole(W[6])}
    busy = {W[6]: 1, W[7]: 2}
    assert repair(feeds_of, W[0], [W[5]], Ways(topology, holders, busy)) == {W[5]: whole(W[9])}
    assert nearest(W[5], [W[0], H[1], W[7], W[9]], topology, {}) == [W[7], H[1], W[9], W[0]]


def test_without_a_copy_the_head_takes_storage_and_else_has_no_way() -> None:
    feeds_of = {W[1]: whole(W[0]), W[2]: whole(W[1])}
    answer = repair(feeds_of, W[0], [W[1]], Ways(singles(3), has_storage=True))
    assert answer == {W[1]: (Feed(FromStorage(), ALL),)}
    assert repair(feeds_of, W[0], [W[1]], Ways(singles(3))) == {}


def test_somebody_who_loads_the_same_is_asked_when_no_copy_is_left() -> None:
    feeds_of = {W[1]: whole(W[0]), W[2]: whole(W[7]), W[3]: whole(W[2])}
    assert repair(feeds_of, W[0], [W[1]], Ways(singles(8))) == {W[1]: whole(W[2])}


def test_only_the_shards_of_the_lost_one_are_replaced() -> None:
    plan = make_plan(request(copies(*W[:4]), W[4:12], layers=(1000,) * 24), rails(3, 4), "sharded")
    feeds_of = {load.receiver: load.feeds for load in plan.loads}
    lost = W[5]
    receivers = readers_of(feeds_of, lost)
    answer = repair(feeds_of, lost, receivers, Ways(rails(3, 4), W[:4]))
    assert sorted(answer) == sorted(receivers)
    for receiver, feeds in answer.items():
        for old, new in zip(feeds_of[receiver], feeds, strict=True):
            assert new.chunks == old.chunks
            assert (new == old) == (old.upstream != FromWorker(lost))
    repaired = {r: f for r, f in (feeds_of | answer).items() if r != lost}
    check_sound(repaired, list(W[:4]))


@given(data=st.data())
@settings(max_examples=examples(80))
def test_plans_survive_the_loss_of_member_after_member(data: st.DataObject) -> None:
    topology = rails(4, 4)
    strategy = data.draw(st.sampled_from(STRATEGIES[1:6]))
    sources = data.draw(st.integers(1, 4))
    workers = data.draw(st.permutations(W[:16]))
    targets = workers[sources : sources + data.draw(st.integers(2, 9))]
    asked = request(copies(*workers[:sources]), targets, layers=(1000,) * 24, chunk_bytes=1000)
    plan = make_plan(asked, topology, strategy)
    feeds_of = {load.receiver: load.feeds for load in plan.loads}
    holders = list(workers[:sources])
    for _ in range(data.draw(st.integers(1, 5))):
        lost = data.draw(st.sampled_from(sorted([*feeds_of, *holders])))
        assume(len(feeds_of) > 1 or lost not in feeds_of)
        is_dead = data.draw(st.booleans())  # else: it delivers corrupt bytes, and goes on itself
        holders = [h for h in holders if h != lost]
        receivers = readers_of(feeds_of, lost)
        answer = repair(feeds_of, lost, receivers, Ways(topology, holders, has_storage=True))
        assert sorted(answer) == sorted(receivers)
        for receiver in receivers:
            old = [feed.chunks for feed in feeds_of[receiver]]
            assert [feed.chunks for feed in answer[receiver]] == old
        feeds_of |= answer
        if is_dead or not feeds_of.get(lost):
            feeds_of.pop(lost, None)
        check_sound(feeds_of, holders)
