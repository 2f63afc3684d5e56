"""Requests that cannot be computed: the executor raises, or its worker ends, at some position.

Which requests these are, and where, follows from the seed. The others of their Runs are all right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from livescale.batching.runs.faulty_runs import FaultyRequest, RunFailed, find_faulty
from livescale.batching.runs.run import Run, Segment
from livescale.load.traces import TraceRow
from livescale.sim.base.config import FaultConfig
from livescale.values.types import ModelSpec, RequestId


@dataclass(frozen=True, slots=True)
class _Place:
    """A position that cannot be computed, of which so many tokens are of the prompt. `permille` of
    the layers, or of the stages, lie before what fails. What is fatal fails in any layer of its
    stage."""

    position: int
    prompt_tokens: int
    permille: int
    is_fatal: bool = False

    def is_in(self, segment: Segment, run: Run, spec: ModelSpec) -> bool:
        first = segment.first_position
        if not first <= self.position < first + segment.token_count:
            return False
        if spec.stage is not None:
            return self.permille * spec.stage.count // 1000 == spec.stage.number
        if self.is_fatal:
            return True
        return run.span.start <= self.permille * spec.layers // 1000 < run.span.stop


class Poison:
    """All such requests of a world: those with which an executor raises, and those that kill."""

    def __init__(self, faults: FaultConfig, seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._raising: dict[RequestId, _Place] = {}
        self._killing: dict[RequestId, _Place] = {}

    def draw(self, request: RequestId, row: TraceRow) -> None:
        """The request will arrive, and may be one."""
        faults, rng = self._faults, random.Random(f"poison {self._seed} {request}")
        kind = rng.randrange(1000)
        # No position is computed of the last token.
        last = row.input_tokens + row.output_tokens - 2
        position = rng.choice([rng.randint(0, row.input_tokens - 1), rng.randint(0, last)])
        permille = rng.randrange(1000)
        if kind < faults.raising_permille:
            self._raising[request] = _Place(position, row.input_tokens, permille)
        elif kind < faults.raising_permille + faults.killing_permille:
            self._killing[request] = _Place(position, row.input_tokens, permille, is_fatal=True)

    def raises(self, request: RequestId) -> bool:
        """No executor can compute it."""
        return request in self._raising

    def tokens_max(self, request: RequestId) -> int | None:
        """Tokens that can come of it (None: all)."""
        place = self._raising.get(request) or self._killing.get(request)
        return None if place is None else max(place.position + 1 - place.prompt_tokens, 0)

    def kills(self, run: Run, spec: ModelSpec) -> bool:
        """The worker ends by the Run."""
        return any(_is_in(self._killing, segment, run, spec) for segment in run.segments)

    def faulty(self, run: Run, spec: ModelSpec) -> tuple[FaultyRequest, ...]:
        """The requests of the Run that an executor finds at fault."""

        def execute(piece: Run) -> None:
            if any(_is_in(self._raising, s, piece, spec) for s in piece.segments):
                raise RunFailed("poison")

        if not self._raising:
            return ()
        try:
            execute(run)
        except RunFailed as failure:
            return tuple(find_faulty(run, failure, execute)[1])
        return ()


def _is_in(places: dict[RequestId, _Place], segment: Segment, run: Run, spec: ModelSpec) -> bool:
    place = places.get(segment.request)
    return place is not None and place.is_in(segment, run, spec)
