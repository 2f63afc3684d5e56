"""An instance whose engine schedules by itself: each Run stands for one step of the engine.

Which requests are the instance's, and which token comes next, is decided here; in which order they
run, and where their KV lies, by the engine. A Run needs the whole model: it begins when that is
there, or (overlap) with its first layer, and waits inside for the others. Nothing is passed to
other instances: KV does not leave the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.batching.contract.live_messages import LiveMessage, refusal
from livescale.batching.contract.serving import Capabilities, Serving
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.engine_step import EngineLoad, EngineStep, StepTokens
from livescale.batching.runs.run import EmittedTokens, EngineAsk, Run, SequenceSpec
from livescale.messages.events import InstanceReported
from livescale.values.routes import Taker
from livescale.values.types import InstanceId, LayerSpan, RequestId, WorkerRef
from livescale.values.units import NS_PER_S

_Attempt = tuple[RequestId, int]


@dataclass(slots=True)
class _Hosted:
    """A request that is here. The engine has it from the Run on that took it."""

    spec: SequenceSpec
    emitted: int = 0
    is_in_engine: bool = False

    @property
    def attempt(self) -> _Attempt:
        return self.spec.request, self.spec.attempt


class EngineServing(Serving):
    """Decides the Runs of one instance of a model of `span`, whose engine has KV for
    `config.kv_blocks`. With `overlaps` Runs begin while layers arrive."""

    def __init__(
        self,
        instance: InstanceId,
        config: BatcherConfig,
        span: LayerSpan,
        *,
        overlaps: bool = False,
    ) -> None:
        self.instance = instance
        self._config = config
        self._span = span
        self._overlaps = overlaps
        self._watermark = 0
        #: by request: at most one attempt is here
        self._hosted: dict[RequestId, _Hosted] = {}
        #: what the engine still has and is to forget
        self._forgotten: list[_Attempt] = []
        self._returned: list[_Attempt] = []
        self._refused: list[tuple[RequestId, int, str]] = []
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []
        self._in_flight: Run | None = None
        #: the one in flight began before the last layer was there
        self._awaits_layers = False
        self._runs = 0
        self._load = EngineLoad()
        self._admitted: list[_Attempt] = []
        self._started: list[_Attempt] = []
        self._emitted_tokens = self._prefix_lookup_tokens = self._reused_tokens = 0
        self._prefill_tokens = self._prefill_ns = 0

    # -- what comes in --------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        tokens, took_ns = self._prefill_tokens, self._prefill_ns
        rate = tokens * NS_PER_S // took_ns if took_ns else None
        return Capabilities(
            whole_model_only=not self._overlaps,
            runs_await_layers=self._overlaps,
            kv_blocks=self._config.kv_blocks,
            prefill_tokens_per_s=rate or None,
        )

    def layers_arrived(self, watermark: int) -> None:
        self._watermark = watermark

    def add(self, spec: SequenceSpec) -> None:
        here = self._hosted.get(spec.request)
        if here is not None and here.spec.attempt >= spec.attempt:
            raise ValueError(f"request {spec.request} is on this instance in a later attempt")
        self._check(spec)
        if here is not None:
            self._forget(here)
        self._hosted[spec.request] = _Hosted(spec)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        here = self._hosted.get(request)
        if here is None or here.spec.attempt != attempt:
            return False
        self._forget(here)
        return True

    def requests(self) -> list[_Attempt]:
        return [here.attempt for here in self._hosted.values()]

    def give_back(self) -> list[_Attempt]:
        """The engine forgets everything when its model is released."""
        assert self._in_flight is None, f"{self!r}: a Run is in flight"
        own = self.requests()
        self._hosted.clear()
        return own

    # -- Runs -----------------------------------------------------------------------------------

    def next(self, steps_max: int = 1) -> Run | None:
        needed = self._span.start + 1 if self._overlaps else self._span.stop
        if self._in_flight is not None or self._watermark < needed:
            return None
        if not self._hosted and not self._forgotten:
            return None
        new = [here for here in self._hosted.values() if not here.is_in_engine]
        for here in new:
            here.is_in_engine = True
        forgotten, self._forgotten = tuple(self._forgotten), []
        self._awaits_layers = self._watermark < self._span.stop
        self._runs += 1
        ask = EngineAsk(tuple([here.spec for here in new]), forgotten)
        self._in_flight = Run(self._runs, self._span, (), asks=ask)
        return self._in_flight

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        raise AssertionError(f"{self!r}: what comes of its Runs is an EngineStep")

    def stepped(self, run: Run, step: EngineStep, elapsed_ns: int) -> list[EmittedTokens]:
        assert run == self._in_flight, f"{self!r}: {run} is not in flight"
        self._in_flight = None
        self._load = step.load
        if step.is_given_up:
            self._was_given_up()
        # What it took to wait says nothing about the next Run.
        if step.prefill_tokens and not self._awaits_layers:
            self._prefill_tokens += step.prefill_tokens
            self._prefill_ns += elapsed_ns
        self._admitted += [pair for pair in step.admitted if self._find(pair) is not None]
        for request, attempt, reason in step.refused:
            if self._find((request, attempt)) is not None:
                del self._hosted[request]
                self._refused.append((request, attempt, reason))
        emitted = []
        for tokens in step.tokens:
            here = self._find((tokens.request, tokens.attempt))
            # One that was cancelled during the step is forgotten before the next one.
            if here is not None:
                emitted.append(self._emit(here, tokens))
        return emitted

    def take_refused(self) -> list[tuple[RequestId, int, str]]:
        refused, self._refused = self._refused, []
        return refused

    # -- what can be asked ----------------------------------------------------------------------

    def report(self) -> InstanceReported:
        admitted, self._admitted = tuple(self._admitted), []
        started, self._started = tuple(self._started), []
        new = [here for here in self._hosted.values() if not here.is_in_engine]
        waiting_tokens = sum([here.spec.known_tokens for here in new])
        load = self._load
        return InstanceReported(
            instance=self.instance,
            admitted=admitted,
            started=started,
            running=load.running,
            queued_prefill_tokens=load.queued_prefill_tokens + waiting_tokens,
            begun_prompt_tokens=load.begun_prompt_tokens,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks=self._config.kv_blocks,
            emitted_tokens=self._emitted_tokens,
            left_out=load.waiting,
            preemptions=load.preemptions,
            prefix_lookup_tokens=self._prefix_lookup_tokens,
            reused_tokens=self._reused_tokens,
            prefill_tokens=self._prefill_tokens,
            prefill_ns=self._prefill_ns,
        )

    # -- other instances ------------------------------------------------------------------------

    def drain_to(self, takers: Sequence[Taker]) -> None:
        """What has no token yet is returned; the others end here."""
        assert self._in_flight is None, f"{self!r}: a Run is in flight"
        for here in [*self._hosted.values()] if takers else ():
            if not here.emitted:
                self._returned.append(here.attempt)
                self._forget(here)

    def take_returned(self) -> list[_Attempt]:
        returned, self._returned = self._returned, []
        return returned

    @property
    def is_alone(self) -> bool:
        return not self._outbox and not self._returned

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, came_ns: int | None = None
    ) -> int | None:
        """The peer is told that nothing passes."""
        answer = refusal(message)
        if answer is not None:
            self._outbox.append((peer, answer))
        return None

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def __repr__(self) -> str:
        return (
            f"<EngineServing {self.instance}, {self._watermark}/{self._span.stop} layers,"
            f" {len(self._hosted)} requests>"
        )

    # -- helpers, in the order used -------------------------------------------------------------

    def _check(self, spec: SequenceSpec) -> None:
        if spec.sampling.embeds:
            raise ValueError("embeddings: the engine of this model gives none")
        room = self._config.kv_blocks * self._config.block_tokens
        wanted = len(spec.prompt_ids) + spec.sampling.output_tokens_max
        if wanted > room:
            raise ValueError(f"a request of {wanted} tokens, and KV for {room}")

    def _was_given_up(self) -> None:
        """What is here would be told to the engine again."""
        self._forgotten.clear()
        for here in self._hosted.values():
            assert not here.emitted, f"{self!r}: {here.attempt} had tokens before the last layer"
            here.is_in_engine = False

    def _forget(self, here: _Hosted) -> None:
        del self._hosted[here.spec.request]
        if here.is_in_engine:
            self._forgotten.append(here.attempt)

    def _find(self, attempt: _Attempt) -> _Hosted | None:
        here = self._hosted.get(attempt[0])
        return here if here is not None and here.attempt == attempt else None

    def _emit(self, here: _Hosted, tokens: StepTokens) -> EmittedTokens:
        spec, cached_tokens = here.spec, 0
        index = len(spec.generated_ids) + here.emitted
        if not here.emitted:
            self._started.append(here.attempt)
            self._prefix_lookup_tokens += spec.known_tokens
            self._reused_tokens += tokens.cached_tokens
            if index == 0:  # a later attempt finds what an earlier one has written
                cached_tokens = min(tokens.cached_tokens, len(spec.prompt_ids))
        here.emitted += len(tokens.token_ids)
        self._emitted_tokens += len(tokens.token_ids)
        if tokens.finish_reason is not None:
            del self._hosted[spec.request]
        return EmittedTokens(
            spec.request,
            spec.attempt,
            index,
            tokens.token_ids,
            tokens.finish_reason,
            cached_tokens,
        )
