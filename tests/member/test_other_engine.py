"""Another engine behind a member's instance: it schedules by itself and needs whole models."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.batcher import BatcherConfig
from livescale.batching.live_batch import LiveLimits
from livescale.batching.live_messages import LiveMessage, Offer, Parted, refusal
from livescale.batching.run import BatchKey, EmittedTokens, Run, Segment, SequenceSpec
from livescale.batching.serving import Capabilities, KvPlaces, Serving
from livescale.member import effects
from livescale.member.attempts import HostedAttempts
from livescale.member.inputs import ExecutorReady, PeerSent, RunEnded
from livescale.member.instance import HostedInstance, ServingLimits
from livescale.messages.commands import StartHolding
from livescale.messages.events import CapacityMeasured, InstanceReported, RequestEnded
from livescale.routes import Duty, Taker
from livescale.types import (
    FinishReason,
    HoldingId,
    LayerSpan,
    Outcome,
    RequestId,
    SamplingParams,
    WorkerRef,
)

OWN, PEER = WorkerRef(0), WorkerRef(1)
SPAN = LayerSpan(0, 5)
BLOCKS, RATE = 7, 1000


class StepEngine:
    """Takes all requests into each of its steps; every step gives each of them one token."""

    def __init__(self) -> None:
        self.specs: dict[RequestId, SequenceSpec] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.watermark = self.steps = 0
        self.is_running = False
        self.outbox: list[tuple[WorkerRef, LiveMessage]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(True, BLOCKS, RATE if self.steps else None)

    def layers_arrived(self, watermark: int) -> None:
        self.watermark = watermark

    def add(self, spec: SequenceSpec) -> None:
        self.specs[spec.request], self.tokens[spec.request] = spec, []

    def cancel(self, request: RequestId, attempt: int) -> bool:
        self.tokens.pop(request, None)
        return self.specs.pop(request, None) is not None

    def requests(self) -> list[tuple[RequestId, int]]:
        return [(spec.request, spec.attempt) for spec in self.specs.values()]

    def give_back(self) -> list[tuple[RequestId, int]]:
        own = self.requests()
        self.specs.clear()
        return own

    def next(self, steps_max: int = 1) -> Run | None:
        assert self.watermark == SPAN.stop, "it needs the whole model"
        if self.is_running or not self.specs:
            return None
        self.is_running, self.steps = True, self.steps + 1
        segments = [
            Segment(spec.request, spec.attempt, 0, (1,), (), True, spec.sampling)
            for spec in self.specs.values()
        ]
        return Run(self.steps, SPAN, tuple(segments))

    def shorten(self, run: Run, steps: int) -> Run:
        raise AssertionError("its Runs have one step")

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        self.is_running, emitted = False, []
        for segment, ids in zip(run.segments, token_ids, strict=True):
            if segment.request not in self.specs:
                continue
            tokens = self.tokens[segment.request]
            is_last = len(tokens) + 1 == segment.sampling.output_tokens_max
            reason = FinishReason.LENGTH if is_last else None
            emitted.append(
                EmittedTokens(segment.request, segment.attempt, len(tokens), ids, reason)
            )
            tokens += ids
            if is_last:
                del self.specs[segment.request]
        return emitted

    def report(self) -> InstanceReported:
        return InstanceReported(
            instance=3,
            started=(),
            running=len(self.specs),
            queued_prefill_tokens=0,
            kv_blocks_used=0,
            kv_blocks=BLOCKS,
            emitted_tokens=sum(map(len, self.tokens.values())),
        )

    # It passes nothing.

    is_alone = True

    def work_alone(self) -> None:
        return

    def drain_to(self, takers: Sequence[Taker]) -> None:
        return

    def take_returned(self) -> Sequence[tuple[RequestId, int]]:
        return ()

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        return None

    def take_message(self, peer: WorkerRef, message: LiveMessage, now_ns: int) -> int | None:
        answer = refusal(message)
        if answer is not None:
            self.outbox.append((peer, answer))
        return None

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        return

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        outbox, self.outbox = self.outbox, []
        return outbox

    def deadline_ns(self) -> int | None:
        return None

    def holds(self, key: BatchKey) -> bool:
        return False

    def kv_places(self, key: BatchKey) -> KvPlaces:
        raise AssertionError(f"{key} was never here")


def hosted(engine: Serving) -> tuple[HostedInstance, HostedAttempts, list[effects.Effect]]:
    said: list[effects.Effect] = []
    attempts = HostedAttempts(OWN, said.append, 0)
    duty = Duty(3, (OWN,))
    order = StartHolding(HoldingId(1, OWN), "m", SPAN, (), 1, duty=duty, measure_capacity=True)
    ready = ExecutorReady(1, BatcherConfig(BLOCKS, 4, 64, 8), 16, 16)
    limits = ServingLimits("cpu", LiveLimits())
    return HostedInstance(order, engine, ready, limits, attempts, said.append), attempts, said


def loaded(instance: HostedInstance) -> None:
    instance.rank_has(0, SPAN.stop)
    instance.is_loaded = True


def run_of(said: list[effects.Effect]) -> Run:
    (run,) = [effect.run for effect in said if isinstance(effect, effects.Execute)]
    said.clear()
    return run


def test_nothing_runs_before_the_model_is_whole_and_then_every_request_ends() -> None:
    instance, attempts, said = hosted(StepEngine())
    attempts.submit("g", 3, SequenceSpec("a", 1, (5, 6), SamplingParams(2)))
    instance.rank_has(0, 3)
    instance.go_on(1, 1, is_awaited=False)
    assert said == [], "layers are missing, and no LiveStarted was sent"
    assert instance.is_to_be_measured
    loaded(instance)
    instance.go_on(2, 1, is_awaited=False)
    for token in (8, 9):
        run = run_of(said)
        assert [segment.request for segment in run.segments] == ["a"]
        instance.run_ended(RunEnded([(token,)], 10))
        instance.go_on(3, 1, is_awaited=False)
    ended = [e.event for e in said if isinstance(e, effects.Report)]
    assert RequestEnded("a", 1, Outcome.FINISHED, 2, OWN) in ended
    assert instance.owed_capacity(None) == CapacityMeasured("cpu", "m", RATE, BLOCKS)


def test_a_partner_is_told_that_nothing_passes_and_what_is_left_runs_elsewhere() -> None:
    instance, attempts, said = hosted(StepEngine())
    loaded(instance)
    offer = Offer(3, BatchKey(9, 1), (5,), (6,))
    instance.take_message(1, offer, PeerSent(PEER, offer))
    instance.go_on(1, 1, is_awaited=False)
    told = [(e.peer, e.message) for e in said if isinstance(e, effects.TellPeer)]
    assert told == [(PEER, Parted(9))]
    attempts.submit("g", 3, SequenceSpec("a", 1, (5, 6), SamplingParams(2)))
    instance.close(2)
    ended = [e.event for e in said if isinstance(e, effects.Report)]
    assert ended[-1] == RequestEnded("a", 1, Outcome.RETURNED, 0, OWN)
