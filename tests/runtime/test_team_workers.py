"""What a worker makes of the members of a team that ends, on real threads and sockets."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
from test_peer_lines import PartnerPlane
from thread_workers import ThreadWorker, all_from

from livescale.batching.contract.live_messages import Declined, Handover
from livescale.batching.contract.visit_messages import Lead, Shared
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.engine.files.model_files import read_manifest
from livescale.messages.events import HoldingCompleted, InstanceReported
from livescale.runtime.member_process.live_parcels import Letter, pack
from livescale.runtime.wire.protocol import Submit, Tokens
from livescale.values.types import LayerSpan, SamplingParams

pytestmark = pytest.mark.usefixtures("machine")

INSTANCE, LEADER = 1, 5
SHARED = 16


def test_requests_of_a_team_that_ends_come_between_the_same_two_runs(tiny_model: Path) -> None:
    """All that came during a Run. One at a time each would wait for a Run of others."""
    manifest = read_manifest(tiny_model, "tiny")
    worker = ThreadWorker(1, 8 << 20)
    leader = PartnerPlane(8, worker.data_plane)
    come = worker.data_plane.on_parcel
    assert come is not None
    parcels = [pack(Letter(handover(number), ("g0",)))[0] for number in range(SHARED)]

    def all_come() -> None:
        for parcel in parcels:
            come(leader.ref, parcel)

    try:
        feeds = all_from(manifest, None)
        worker.load(INSTANCE, manifest, feeds, directory=str(tiny_model))
        worker.heard(lambda word: isinstance(word, HoldingCompleted))
        worker.submit(Submit("r", 1, INSTANCE, tuple(range(10, 40)), (), SamplingParams(200)))
        worker.heard(lambda word: isinstance(word, Tokens))
        worker.once(InstanceReported, all_come)
        # It has no blocks for them: it says so of each as soon as that is absorbed.
        runs = []
        for number in range(SHARED):
            assert leader.heard(lambda m: isinstance(m, Declined)) == Declined(key(number))
            runs.append(tokens_said(worker))
        assert sum(runs[1:]) < SHARED // 2
    finally:
        leader.close()
        worker.close()


# -- helpers --------------------------------------------------------------------------------------


def key(number: int) -> BatchKey:
    return BatchKey(LEADER, number + 1)


def handover(number: int) -> Handover:
    """One request that decodes, in a block of the leader's."""
    spec = SequenceSpec(f"s{number}", 1, (1, 2, 3), SamplingParams(8), (4,))
    shared = Shared(Lead(LEADER, 1), (number,), LayerSpan(1, 2))
    return Handover(key(number), (spec,), 0, decoding=True, shared=shared)


def tokens_said(worker: ThreadWorker) -> int:
    """Runs that have ended since the last call: the only request there has a token of each."""
    count = 0
    while True:
        try:
            count += isinstance(worker.said.get_nowait(), Tokens)
        except queue.Empty:
            return count
