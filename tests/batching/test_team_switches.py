"""Teams end among decodes: no token is lost, and none comes twice (λScale §4.4, mode switch)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from live_parts import Node
from team_worlds import ENDS, LAYERS, TeamWorld

from effort import examples
from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.contract.visit_messages import Kept
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import Run
from livescale.values.types import RequestId, WorkerRef

PLAYS, SWITCHES = 220, 200
#: before the first of these no request decodes in the team, behind the last one some may have ended
STOP_NS = (1_500, 4_000)


@pytest.mark.more
def test_no_token_is_lost_or_repeated_in_200_random_mode_switches() -> None:
    """Requests that had tokens from the team have the others from instances that serve alone."""
    plays = examples(PLAYS)
    switches = Counter(way for seed in range(plays) for way in switch(seed))
    assert switches.total() >= SWITCHES * plays // PLAYS, switches
    for way in ("moved", "anew"):
        assert switches[way] * 3 >= switches.total(), switches


def switch(seed: int) -> list[str]:
    """Play a world. How its team ended, if a request decoded then."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(2, LAYERS + 1), rng.randint(1, 3)))
    end, stop_ns = ENDS[seed % len(ENDS)], rng.randrange(*STOP_NS)
    delays = [rng.randint(0, 40) for _ in range(rng.randint(1, 4))]
    config = BatcherConfig(rng.choice([24, 48]), 4, 64, 16, growth_tokens=4)
    world = TeamWorld(cuts, config=config, delays=delays, stop_ns=stop_ns, end=end)
    for number in range(rng.randint(3, 6)):
        first = rng.choice([0, number])  # some begin alike
        prompt = range(first, first + rng.randint(4, 24))
        ask = partial(world.request, f"r{number}", world.leader, prompt, rng.randint(12, 30))
        world.at(rng.randint(0, 900), ask)
    if rng.random() < 0.3:
        world.at(stop_ns + rng.randint(0, 400), partial(world.cancel, "r0"))
    led: dict[RequestId, int] = {}
    switched: dict[RequestId, None] = {}
    kept: list[LiveMessage] = []

    def watch(node: Node, run: Run) -> None:
        for segment in run.segments:
            if run.is_visit and segment.samples:
                led[segment.request] = len(segment.generated_ids) + 1
            elif not run.is_visit and segment.samples and segment.request in led:
                assert len(segment.generated_ids) >= led[segment.request], "no token comes again"
                switched[segment.request] = None

    def listen(sender: WorkerRef, receiver: WorkerRef, message: LiveMessage) -> None:
        if isinstance(message, Kept):
            kept.append(message)

    world.watch, world.listen = watch, listen
    world.play()
    world.check_end()
    return ["moved" if kept else "anew"] if switched else []
