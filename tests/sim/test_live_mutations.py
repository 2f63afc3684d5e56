"""The swarm finds bugs of live scaling: it is broken on purpose, and some seed must say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from livescale.batching.contract.live_messages import LiveMessage, Pull
from livescale.batching.live.live_batch import LiveBatch
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.live.live_batches import LiveBatches
from livescale.batching.live.live_giver import LiveGiver
from livescale.batching.live.live_taker import LiveTaker
from livescale.control.requests.attempts import Attempts
from livescale.member.attempts import HostedAttempts
from livescale.member.inputs import PeerSent
from livescale.member.instance import HostedInstance
from livescale.member.ledger import AttemptReport, Entry, Ledger, LedgerEffect
from livescale.member.presence import Presence
from livescale.messages.attempts import AttemptTaken
from livescale.messages.events import BatchTaken
from livescale.sim.swarm.seeds import run_seed
from livescale.values.types import Part, WorkerRef

SEEDS = range(200)

Break = Callable[[pytest.MonkeyPatch], None]


def targets_run_layers_that_are_not_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveBatcher, "loaded", property(lambda self: self._decoder_layers))


def ranks_do_not_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 runs what it has itself."""

    def broken(self: Presence, rank: int, watermark: int, beyond: tuple[int, ...] = ()) -> None:
        if rank == 0:
            self._grows(watermark)

    patch.setattr(Presence, "has", broken)


def sources_do_not_pull(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveTaker, "_ahead_ns", lambda self: 1 << 62)


def sources_do_not_wait_for_kv(patch: pytest.MonkeyPatch) -> None:
    join = LiveBatches.join_if_complete

    def broken(self: LiveBatches, batch: LiveBatch) -> None:
        if batch.next_layer == self._stop:
            batch.kv_missing.clear()
        join(self, batch)

    patch.setattr(LiveBatches, "join_if_complete", broken)


def takers_say_nothing_to_the_gateway(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Ledger, worker: WorkerRef, report: AttemptReport) -> Sequence[LedgerEffect]:
        return () if isinstance(report, AttemptTaken) else reported(self, worker, report)

    reported = Ledger.reported
    patch.setattr(Ledger, "reported", broken)


def tokens_of_any_worker_are_taken(patch: pytest.MonkeyPatch) -> None:
    """Every worker that sends tokens of the current attempt counts as its owner."""

    def broken(self: Entry, worker: WorkerRef, attempt: int) -> bool:
        return attempt == self.attempt

    patch.setattr(Entry, "is_run_by", broken)


def the_controller_does_not_follow(patch: pytest.MonkeyPatch) -> None:
    """Batches that were taken over stay where they were sent."""

    def broken(self: Attempts, event: BatchTaken, part: Part | None) -> bool:
        return False

    patch.setattr(Attempts, "taken", broken)


def failed_targets_keep_their_requests(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostedAttempts, gateway: str, request: str, attempt: int) -> None:
        return

    patch.setattr(HostedAttempts, "_give_back", broken)


def targets_forget_what_they_gave(patch: pytest.MonkeyPatch) -> None:
    """A batch that was handed over is nobody's, if the source is lost before it says that it has
    it."""

    def broken(self: LiveGiver, batch: LiveBatch) -> None:
        self._batches.end(batch)

    patch.setattr(LiveGiver, "_take_back", broken)


def pulls_are_not_answered(patch: pytest.MonkeyPatch) -> None:
    take = HostedInstance.take_message

    def broken(self: HostedInstance, now_ns: int, message: LiveMessage, sent: PeerSent) -> None:
        if not isinstance(message, Pull):
            take(self, now_ns, message, sent)

    patch.setattr(HostedInstance, "take_message", broken)


def what_a_draining_instance_gives_back_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostedAttempts, request: str, attempt: int) -> None:
        self._gateway_of.pop(request)

    patch.setattr(HostedAttempts, "returned", broken)


def what_a_former_target_gives_back_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    work_alone = LiveBatcher.work_alone

    def broken(self: LiveBatcher) -> None:
        work_alone(self)
        self._returned.clear()

    patch.setattr(LiveBatcher, "work_alone", broken)


class Mutation(NamedTuple):
    """What is broken, the rule that catches it, and a seed whose world shows it soon."""

    break_it: Break
    rule: str
    seed: int


#: `pytest --long -rP` prints the first seeds that show them, should worlds be drawn anew
MUTATIONS = [
    Mutation(targets_run_layers_that_are_not_there, "only layers that are there are run", 4),
    Mutation(ranks_do_not_wait_for_each_other, "only layers that are there are run", 14),
    Mutation(sources_do_not_pull, "a source is not idle", 39),
    Mutation(sources_do_not_wait_for_kv, "a request decodes when its KV is there", 1),
    Mutation(takers_say_nothing_to_the_gateway, "every request ends|every attempt ends", 22),
    Mutation(tokens_of_any_worker_are_taken, "each index comes once", 69),
    Mutation(the_controller_does_not_follow, "every attempt ends|one attempt at a time", 49),
    Mutation(failed_targets_keep_their_requests, "every request ends|every attempt ends", 18),
    Mutation(targets_forget_what_they_gave, "every request ends|every attempt ends", 39),
    Mutation(pulls_are_not_answered, "a source is not idle", 39),
    Mutation(what_a_draining_instance_gives_back_is_forgotten, "every request ends", 15),
    Mutation(what_a_former_target_gives_back_is_forgotten, "every request ends", 73),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.break_it.__name__)
def test_the_world_of_a_seed_shows_it_live(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation.break_it(monkeypatch)
    outcome = run_seed(mutation.seed)
    assert re.search(mutation.rule, outcome.error), outcome.trace or "nothing is noticed"


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.break_it.__name__)
def test_some_seed_shows_it_live(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """And which, when that of the table does not show it any more."""
    mutation.break_it(monkeypatch)
    broken = (outcome for outcome in map(run_seed, (mutation.seed, *SEEDS)) if outcome.error)
    found = next((o for o in broken if re.search(mutation.rule, o.error)), None)
    assert found is not None, f"no seed of {SEEDS} shows it"
    print(f"seed {found.seed}: {found.error[:160]}")
