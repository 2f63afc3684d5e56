"""The swarm finds bugs of live scaling: it is broken on purpose, and some seed must say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from effort import mostly_long
from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.live_giver import LiveGiver
from livescale.batching.live_messages import LiveMessage
from livescale.batching.live_taker import LiveTaker
from livescale.batching.run import EmittedTokens
from livescale.control.attempts import Attempts
from livescale.messages.events import BatchTaken
from livescale.sim.gateway import SimGateway
from livescale.sim.serving import SimServing
from livescale.sim.swarm import run_seed
from livescale.sim.worker import SimWorker
from livescale.sim.worker_messages import SimAttemptTaken
from livescale.types import WorkerRef

#: worlds in which loading instances help, with faults and without, and with several ranks
SEEDS = (4, 5, 32, 39, 83, 87, 91, 364, 367)

Break = Callable[[pytest.MonkeyPatch], None]


def targets_run_layers_that_are_not_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveBatcher, "loaded", property(lambda self: self._decoder_layers))


def ranks_do_not_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 runs what it has itself."""

    def broken(self: SimWorker, a: object, rank: int, watermark: int) -> None:
        if rank == 0:
            a.serving.layers_there(watermark)  # type: ignore[attr-defined]

    patch.setattr(SimWorker, "_rank_has", broken)


def sources_do_not_pull(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveTaker, "_ahead_ns", lambda self: 1 << 62)


def sources_do_not_wait_for_kv(patch: pytest.MonkeyPatch) -> None:
    computed = LiveTaker.computed

    def broken(self: LiveTaker, batch: object) -> None:
        batch.kv_missing.clear()  # type: ignore[attr-defined]
        computed(self, batch)  # type: ignore[arg-type]

    patch.setattr(LiveTaker, "computed", broken)


def takers_say_nothing_to_the_gateway(patch: pytest.MonkeyPatch) -> None:
    def broken(self: SimGateway, worker: WorkerRef, message: SimAttemptTaken) -> None:
        return

    patch.setattr(SimGateway, "_taken", broken)


def tokens_of_anybody_are_taken(patch: pytest.MonkeyPatch) -> None:
    """Whoever sends tokens of the current attempt is the one who runs it."""
    take = SimGateway._take

    def broken(
        self: SimGateway, worker: WorkerRef, emitted: EmittedTokens, came_ns: list[int]
    ) -> None:
        transcript = self._transcripts.get(emitted.request)
        if transcript is not None and transcript.worker is not None:
            transcript.worker = worker
        take(self, worker, emitted, came_ns)

    patch.setattr(SimGateway, "_take", broken)


def the_controller_does_not_follow(patch: pytest.MonkeyPatch) -> None:
    """Batches that were taken over stay where they were sent."""

    def broken(self: Attempts, event: BatchTaken) -> bool:
        return False

    patch.setattr(Attempts, "taken", broken)


def failed_targets_keep_their_requests(patch: pytest.MonkeyPatch) -> None:
    def broken(self: SimWorker, attempts: Sequence[tuple[str, int]]) -> None:
        return

    patch.setattr(SimWorker, "_return", broken)


def targets_forget_what_they_gave(patch: pytest.MonkeyPatch) -> None:
    """A batch that was handed over is nobody's, if the source is lost before it says that it has
    it."""

    def broken(self: LiveGiver, batch: object) -> None:
        self._settle(batch)  # type: ignore[arg-type]

    patch.setattr(LiveGiver, "_take_back", broken)


def pulls_are_not_answered(patch: pytest.MonkeyPatch) -> None:
    heard = SimServing._heard

    def broken(self: SimServing, peer: WorkerRef, message: LiveMessage, size_bytes: int) -> None:
        if type(message).__name__ != "Pull":
            heard(self, peer, message, size_bytes)

    patch.setattr(SimServing, "_heard", broken)


#: the mutation, and the rule that catches it
MUTATIONS: list[tuple[Break, str]] = [
    (targets_run_layers_that_are_not_there, "only layers that are there are run"),
    (ranks_do_not_wait_for_each_other, "only layers that are there are run"),
    (sources_do_not_pull, "a source is not idle"),
    (sources_do_not_wait_for_kv, "a request decodes when its KV is there"),
    (takers_say_nothing_to_the_gateway, "every request ends|every attempt ends"),
    (tokens_of_anybody_are_taken, "each index comes once"),
    (the_controller_does_not_follow, "every attempt ends|one attempt at a time|holds what"),
    (failed_targets_keep_their_requests, "every request ends|every attempt ends"),
    (targets_forget_what_they_gave, "every request ends|every attempt ends"),
    (pulls_are_not_answered, "a source is not idle"),
]


@pytest.mark.parametrize(
    ("mutation", "rule"),
    mostly_long(MUTATIONS, MUTATIONS[:4]),
    ids=[mutation.__name__ for mutation, _ in MUTATIONS],
)
def test_some_seed_catches(mutation: Break, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    outcome = next((o for o in map(run_seed, SEEDS) if o.error), None)
    assert outcome is not None, f"no seed of {SEEDS} notices"
    print(f"seed {outcome.seed}: {outcome.error[:200]}")
    assert re.search(rule, outcome.error), outcome.trace
