"""The executor of a simulated worker: a Run takes as long as the latency model computes.

A Run of several steps (a stretch) is one event. It ends with the step that is under way when
something comes in for the worker.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from livescale.batching.runs.run import Run
from livescale.clusters.topology import Device
from livescale.latency.models import AnyLatency
from livescale.latency.work import RunWork, span_ns, with_cores
from livescale.member.effects import Execute
from livescale.member.inputs import CoresSet, ExecutorReady, LayersRan, RunEnded
from livescale.sim.base.clock import COMMIT_PRIORITY, Clock
from livescale.sim.base.config import SimConfig
from livescale.sim.base.poison import Poison
from livescale.values.scaling_policies import CoresModel
from livescale.values.types import ModelSpec, PlanId
from livescale.values.units import NS_PER_S

_NOTHING = (0,)
"""In the place of a token that could not be computed: no token is 0."""


class ExecutorOwner(Protocol):
    """The worker that an executor belongs to."""

    def shorten(self, steps: int) -> Run:
        """The Run in flight ends after so many steps."""

    def progressed(self, news: RunEnded | LayersRan) -> None:
        """A Run's result, or how far one is of which that is to be told."""

    def killed(self) -> None:
        """The worker ends."""


class SimExecutor:
    """One model at a time, one Run after the other."""

    def __init__(
        self,
        config: SimConfig,
        device: Device,
        clock: Clock,
        poison: Poison,
        owner: ExecutorOwner,
    ) -> None:
        """The worker is killed by what the `poison` says."""
        self._config = config
        self._device = device
        self._clock = clock
        self._poison = poison
        self._owner = owner
        self._spec: ModelSpec | None = None
        self._cores_model: CoresModel | None = None
        self._latency: AnyLatency | None = None
        self.cores = 1
        self._run: Run | None = None
        #: Runs that wait for the end of the one in flight
        self._waiting: deque[Execute] = deque()
        self._began_ns = 0
        #: when the steps of the Run in flight, or of the last one, end
        self.step_ns: list[int] = []

    @property
    def is_idle(self) -> bool:
        """No Run is in flight. (None that could be started is left.)"""
        return self._run is None and not self._waiting

    def assign(self, plan: PlanId, spec: ModelSpec) -> ExecutorReady:
        """Take the model over."""
        self._spec, self._latency = spec, self._config.latency_of(spec.name)
        self._cores_model = self._config.cores_of(spec.name)
        return ExecutorReady(
            plan=plan,
            limits=self._config.batcher(spec, self._device),
            kv_layer_bytes=spec.kv_bytes_per_token // (spec.layers - 2),
            row_bytes=spec.row_bytes_per_token,
            stage=spec.stage,
        )

    def use_cores(self, cores: int) -> CoresSet:
        """From the next Run on; devices of a world in which cores do nothing keep theirs."""
        self.cores = cores if self._config.cores else self.cores
        return CoresSet(self.cores, asked=cores)

    def prefill_tokens_per_s(self, tokens: int) -> int:
        """The rate of a prefill of so many tokens."""
        assert self._latency is not None
        run_ns = self._with_cores(self._latency.run_ns(RunWork(((tokens, 0),))))
        return max(tokens * NS_PER_S // max(run_ns, 1), 1)

    def start(self, effect: Execute, due_ns: int) -> None:
        """Let the Run take its time, behind those in flight. A stretch ends where progress is worth
        a report (`due_ns`); it is alone."""
        if self.is_idle:
            self._begin(effect, due_ns)
        else:
            self._waiting.append(effect)

    def _begin(self, effect: Execute, due_ns: int = 0) -> None:
        spec, latency, run = self._spec, self._latency, effect.run
        assert spec is not None
        assert latency is not None
        now_ns = self._began_ns = self._clock.now_ns
        work = run.work
        if run.batch is not None:
            layers = run.span.decoder_layers(spec.layers)
            run_ns = span_ns(latency, work, layers, spec.layers - 2)
            self.step_ns = [now_ns + self._with_cores(run_ns)]
        elif run.steps == 1:
            self.step_ns = [now_ns + self._with_cores(latency.run_ns(work))]
            if effect.tells_layers:
                self._tell_layers(run, spec.layers - 2)
        else:
            first_ns = self._with_cores(latency.run_ns(work))
            steps = min(run.steps, max(due_ns - now_ns, 0) // max(first_ns, 1) + 2)
            decodes_ns = latency.decode_ns(work.decodes, work.decode_context_tokens, steps)
            times = map(self._with_cores, decodes_ns)
            self.step_ns = list(itertools.accumulate(times, initial=now_ns))[1:]
            last = min(bisect.bisect_left(self.step_ns, due_ns) + 1, steps)
            del self.step_ns[last:]
            run = self._owner.shorten(last)
        self._end_later(run)

    def end_stretch(self) -> None:
        """Something came in: the Run in flight ends with the step that is under way."""
        if self._run is None or self._run.steps == 1:
            return
        over = bisect.bisect_right(self.step_ns, self._clock.now_ns)
        if over + 1 < self._run.steps:
            del self.step_ns[over + 1 :]
            self._end_later(self._owner.shorten(over + 1))

    def stop(self) -> None:
        """Nothing comes of the Runs in flight."""
        self._run = None
        self._waiting.clear()

    # -- helpers, in the order used -------------------------------------------------------------

    def _with_cores(self, run_ns: int) -> int:
        return with_cores(run_ns, self._cores_model, self.cores)

    def _end_later(self, run: Run) -> None:
        self._run = run
        self._clock.at(self.step_ns[-1], partial(self._end, run), COMMIT_PRIORITY)

    def _tell_layers(self, run: Run, layers: int) -> None:
        """All decoder layers take the same time, embedding and head none."""
        run_ns = self.step_ns[-1] - self._began_ns
        for count in range(1, layers):
            at_ns = self._began_ns + run_ns * count // layers
            self._clock.at(at_ns, partial(self._tell, run, LayersRan(count + 1)))

    def _tell(self, run: Run, ran: LayersRan) -> None:
        if self._run is run:
            self._owner.progressed(ran)

    def _end(self, run: Run) -> None:
        if self._run is not run:
            return
        self._run = None
        assert self._spec is not None
        if self._poison.kills(run, self._spec):
            self._owner.killed()
            return
        faulty = self._poison.faulty(run, self._spec)
        # The token at a position is the position: another computation of it gives the same.
        ends = [s.first_position + len(s.token_ids) for s in run.segments if s.samples]
        began_ns = self.step_ns[-2] if run.steps > 1 else self._began_ns
        token_ids: list[Sequence[int]] = [range(end, end + run.steps) for end in ends]
        if faulty:
            failed = {(one.request, one.attempt) for one in faulty}
            sampling = [(s.request, s.attempt) for s in run.segments if s.samples]
            places = zip(sampling, token_ids, strict=True)
            token_ids = [_NOTHING if pair in failed else tokens for pair, tokens in places]
        elapsed_ns = self.step_ns[-1] - began_ns
        self._owner.progressed(RunEnded(token_ids, elapsed_ns, faulty=faulty))
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """The next Run begins, unless one is in flight."""
        if self._run is None and self._waiting:
            self._begin(self._waiting.popleft())
