"""The thread of a worker: what its Member asks of an executor, of peers and of gateways.

An instance is three verbs: the Member gives Runs, the executor runs them, and their results go back
as inputs before anything else. A single Run is run here, those that follow one another in a lane:
so nothing that is done here meanwhile keeps them waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from livescale.batching.contract.live_messages import Handover, KvLayer, LiveMessage, WithRows
from livescale.batching.contract.visit_messages import Visit, Visited
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.engine.base.run_result import InstanceExecutor, RunResult
from livescale.member import effects, inputs
from livescale.member.instance import ServingLimits
from livescale.member.member import Member
from livescale.messages.events import AnyEvent
from livescale.runtime.member_process.assigned_model import AssignedModel, ModelFailed
from livescale.runtime.member_process.live_parcels import Letter, ParcelError
from livescale.runtime.member_process.member_thread import MemberThread
from livescale.runtime.member_process.peer_lines import LineEvents, PeerLines
from livescale.runtime.member_process.run_answers import SUM_BYTES, RunAnswers
from livescale.runtime.member_process.run_lane import RunLane
from livescale.runtime.wire.boot import WorkerBoot
from livescale.runtime.wire.protocol import Examined, FromTokenServer, Submit, Token, Tokens
from livescale.transfer.memory.arena import Arena
from livescale.transfer.plane.data_plane import DataPlane
from livescale.values.stages import takes_rows
from livescale.values.types import RequestId, TokenLogprobs, WorkerRef

if TYPE_CHECKING:
    from livescale.engine.base.run_result import HiddenRows

_log = logging.getLogger(__name__)


class Reporter(Protocol):
    """Where a worker's messages go. Both calls may come from any thread and never block."""

    def to_controller(self, event: AnyEvent | Examined) -> None: ...

    def to_gateway(self, gateway: str, message: FromTokenServer) -> None: ...


# A Run, what came of it, requests of which nothing did, and what it took in ns.
_Ended = tuple[Run, RunResult, tuple[FaultyRequest, ...], int]


class WorkerThread(MemberThread):
    """Runs the Member of one worker, with its device, arena and KV pool."""

    def __init__(
        self,
        boot: WorkerBoot,
        arena: Arena,
        executor: InstanceExecutor,
        data_plane: DataPlane,
        reporter: Reporter,
        make_member: Callable[..., Member] = Member,
    ) -> None:
        """`make_member` takes the arguments of a Member."""
        limits = ServingLimits(
            boot.place.kind,
            boot.live,
            boot.pool.resident_bytes,
            own_cores=executor.cores,
            is_engine=executor.is_engine,
        )
        member = make_member(boot.member, arena.size_bytes, limits)
        super().__init__(boot, member, arena, data_plane, reporter.to_controller, executor.prepare)
        self._executor, self.is_engine = executor, executor.is_engine
        self._reporter = reporter
        events = LineEvents(
            expected=self._expected_bytes,
            came=self._came,
            lost=lambda peer, is_refused: self._inputs.append(inputs.PeerLost(peer, is_refused)),
            is_taking=self._is_taking,
        )
        patience_s = boot.live.answer_ns / 1e9
        self._peers = PeerLines(data_plane, events, patience_s=patience_s, post=self.post)
        #: what the executor has
        self._model = AssignedModel(
            executor, lambda plan, why: self.post(inputs.FetchFailed(plan, why))
        )
        self._rows: dict[BatchKey, HiddenRows] = {}
        self._lane: RunLane[_Ended] = RunLane()
        #: the effects that are carried out end with two Runs
        self._is_followed = False
        #: the Run in flight waits for layers that do not come
        self._gives_up = False
        executor.when_missing(self._await_layer)
        #: what came with messages of peers, until they are absorbed
        self._contents: dict[int, bytearray] = {}
        self._answers = RunAnswers()
        self._carry |= {
            effects.Answer: lambda effect: reporter.to_gateway(effect.gateway, effect.answer),
            effects.Emit: self._emit,
            effects.TellPeer: self._tell,
            effects.Refuse: lambda effect: self._peers.refuse(effect.peer, effect.reason),
            effects.Reach: lambda effect: data_plane.reach(effect.peer),
            effects.Release: self._release,
            effects.Assign: self._assign,
            effects.Materialize: lambda effect: self._model.materialize(effect.layer),
            effects.Measure: self._measure,
            effects.UseCores: self._use_cores,
            effects.Execute: self._execute,
            effects.GiveRunUp: self._give_up,
            effects.TakeOver: self._take_over,
            effects.WriteKv: self._write_kv,
            effects.ForgetRows: lambda effect: self._rows.pop(effect.batch, None),
        }

    def run(self) -> None:
        super().run()
        self._lane.close()
        self._peers.close()

    def _take_in(self) -> bool:
        """What waits is taken in when a Run has ended."""
        if self._lane.is_busy:
            with self.pulse.piece():
                self._run_ended(self._lane.take())
        return super()._take_in()

    # -- from other threads ---------------------------------------------------------------------

    def submit(self, gateway: str, message: Submit) -> None:
        """A gateway asks for an attempt."""
        spec = SequenceSpec(
            message.request,
            message.attempt,
            message.prompt_ids,
            message.sampling,
            message.generated_ids,
        )
        self.post(inputs.Submitted(gateway, message.instance, spec))

    def lose_peer(self, peer: WorkerRef) -> None:
        """The controller gave this member up."""
        self.post(lambda: self._peers.lose(peer))

    # -- effects: the executor ------------------------------------------------------------------

    def _assign(self, effect: effects.Assign) -> None:
        fetch = self._fetches.get(effect.plan)
        if fetch is None:
            return  # its memory refused it
        manifest, executor = fetch.order.manifest, self._executor
        try:
            self._model.take(effect.plan, manifest, fetch.memory)
        except ModelFailed as error:
            self._inputs.append(inputs.FetchFailed(effect.plan, str(error)))
            return
        pool = self._boot.pool
        limits = BatcherConfig(
            kv_blocks=executor.kv_blocks,
            block_tokens=pool.block_tokens,
            run_tokens_max=pool.run_tokens_max,
            sequences_max=pool.sequences_max,
            oldest_prompt_percent=pool.oldest_prompt_percent,
            growth_tokens=pool.growth_tokens,
        )
        self._inputs.append(
            inputs.ExecutorReady(
                plan=effect.plan,
                limits=limits,
                kv_layer_bytes=executor.kv_layer_bytes(1),
                row_bytes=self._model.row_bytes,
                stage=manifest.stage,
            )
        )

    def _drop(self, effect: effects.DropFetch) -> None:
        super()._drop(effect)
        self._release(effect)

    def _release(self, effect: effects.DropFetch | effects.Release) -> None:
        """Nothing computes with this model any more; it may have been another one's spare."""
        if effect.plan == self._model.plan:
            self._model.release()
            self._rows.clear()

    def _measure(self, effect: effects.Measure) -> None:
        rate = self._model.prefill_tokens_per_s(effect.tokens)
        if rate is not None:
            self._inputs.append(inputs.RateMeasured(effect.plan, rate))

    def _use_cores(self, effect: effects.UseCores) -> None:
        cores = self._executor.use_cores(effect.cores)
        self._inputs.append(inputs.CoresSet(cores, asked=effect.cores))

    def _carry_out(self, asked: Sequence[effects.Effect]) -> None:
        # Runs come last.
        self._is_followed = len(asked) > 1 and isinstance(asked[-2], effects.Execute)
        super()._carry_out(asked)

    def _execute(self, effect: effects.Execute) -> None:
        if self._is_followed or self._lane.is_busy:
            self._lane.put(partial(self._run, effect))
        else:
            told = self._layer_ran if effect.tells_layers else None
            self._run_ended(self._run(effect, told))

    def _layer_ran(self, layer: int) -> None:
        """Between two layers of a Run, on this thread: what has come is taken in."""
        self._inputs.append(inputs.LayersRan(layer + 1))
        if not self._take_in():
            self.stop()  # when the Run is over
        self._step()
        self.pulse.go_on()

    def _await_layer(self) -> bool:
        """Inside a Run, on this thread."""
        self._gives_up = False
        return self._come_round() and not self._gives_up

    def _give_up(self, _: effects.GiveRunUp) -> None:
        self._gives_up = True

    def _run(
        self, effect: effects.Execute, layer_ran: Callable[[int], None] | None = None
    ) -> _Ended:
        run, parts, executor = effect.run, effect.run.parts, self._executor
        rows = None
        if parts and takes_rows(self._model.stage, run.span):
            rows = executor.join_rows([self._rows.pop(part.key) for part in parts])
        began_ns = time.monotonic_ns()
        result, faulty = self._model.run(run, rows, layer_ran)
        elapsed_ns = time.monotonic_ns() - began_ns
        if parts and result.hidden is not None:
            own = executor.split_rows(result.hidden, [part.token_count for part in parts])
            self._rows.update(zip([part.key for part in parts], own, strict=True))
        return run, result, faulty, elapsed_ns

    def _run_ended(self, ended: _Ended) -> None:
        run, result, faulty, elapsed_ns = ended
        for one in faulty:
            where = " here" if one.runs_elsewhere else ""
            _log.error("%s cannot be computed%s: %s", one.request, where, one.reason)
        hosted = self.member.instance
        self._answers.ran(run, result, hosted.duty.instance if hosted is not None else None)
        tokens = [(token,) for token in result.token_ids]
        self._inputs.insert(0, inputs.RunEnded(tokens, elapsed_ns, result.step, faulty))

    # -- effects: gateways ----------------------------------------------------------------------

    def _emit(self, effect: effects.Emit) -> None:
        tokens: list[Token] = []
        for emitted in effect.emitted:
            logprobs, embedding = None, None
            if not effect.is_repeated:
                logprobs, embedding = self._answers.of(emitted)
            tokens += _tokens_of(emitted, logprobs, embedding)
        self._reporter.to_gateway(effect.gateway, Tokens(tuple(tokens)))

    # -- effects: peers -------------------------------------------------------------------------

    def _tell(self, effect: effects.TellPeer) -> None:
        message, executor = effect.message, self._executor
        # The executor takes one rank only, and refuses more by name.
        assert not isinstance(message, inputs.RankLayers), f"{self!r} has one rank"
        # Where something is given away no Run is in flight.
        content: list[memoryview] = []
        letter = Letter(message, effect.gateways, effect.size_bytes)
        if isinstance(message, WithRows) and message.rows:
            content = [executor.export_rows(self._rows[message.key])]
        elif isinstance(message, KvLayer):
            content = [executor.export_kv(message.layer - 1, t, n) for n, t in effect.places]
        elif isinstance(message, Visited):
            besides, sums = self._answers.leaves(message.key)
            letter, content = Letter(message, (), len(sums), besides), [memoryview(sums)]
        self._peers.send(effect.peer, letter, content)

    def _take_over(self, effect: effects.TakeOver) -> None:
        if effect.message.rows:
            content = memoryview(self._contents[effect.content])
            rows = self._executor.import_rows(content, effect.message.rows)
            self._rows[effect.message.key] = rows

    def _write_kv(self, effect: effects.WriteKv) -> None:
        """Write it into the blocks of the requests that are still here."""
        first, view = 0, memoryview(self._contents[effect.content])
        for tokens, block_table in effect.places:
            stop = first + self._executor.kv_layer_bytes(tokens)
            if block_table:
                part = view[first:stop]
                self._executor.import_kv(effect.message.layer - 1, block_table, tokens, part)
            first = stop

    # -- what peers send ------------------------------------------------------------------------

    def _expected_bytes(self, peer: WorkerRef, letter: Letter) -> int | None:
        if isinstance(letter.message, Visited):
            summed = letter.besides.summed if letter.besides is not None else ()
            if not all(0 <= its.first_position < its.stop for its in summed):
                raise ParcelError("a sum of the rows of no positions")
            return len(summed) * SUM_BYTES * self._model.hidden_size
        size_bytes = self.member.expected_bytes(peer, letter.message)
        for request, ids in _token_ids(letter.message):
            if not all(0 <= i < self._model.vocabulary for i in ids):
                raise ParcelError(f"{request} has tokens that this model has not")
        return size_bytes

    def _is_taking(self, peer: WorkerRef) -> bool:
        """A batch of this peer waits for the member. Its KV follows unasked, and is expected only
        when the batch is the member's. KV of a request of a team that ends is asked for."""
        return any(
            isinstance(news, inputs.PeerSent)
            and news.peer == peer
            and isinstance(news.message, Handover)
            and news.message.shared is None
            for news in (*self._inputs, *self.member.waiting)
        )

    def _came(self, peer: WorkerRef, letter: Letter, content: bytearray, came_ns: int) -> None:
        if letter.besides is not None:
            self._answers.came(letter.besides, content)
        number = len(self._contents) + 1
        self._contents[number] = content
        self._inputs.append(
            inputs.PeerSent(peer, letter.message, letter.gateways, len(content), number, came_ns)
        )

    def _after_step(self) -> None:
        super()._after_step()
        if not self.member.waiting:
            self._contents.clear()
        if not self._answers.is_empty:
            instance = self.member.instance
            self._answers.keep(instance.serving.requests() if instance is not None else ())
        self._peers.open_waiting()


def _tokens_of(
    emitted: EmittedTokens, logprobs: TokenLogprobs | None, embedding: bytes | None
) -> Iterator[Token]:
    for place, token_id in enumerate(emitted.token_ids):
        yield Token(
            request=emitted.request,
            attempt=emitted.attempt,
            index=emitted.index + place,
            token_id=token_id,
            finish_reason=emitted.finish_reason,
            logprobs=logprobs,
            cached_tokens=emitted.cached_tokens,
            embedding=embedding,
        )


def _token_ids(message: LiveMessage) -> Iterator[tuple[RequestId, Sequence[int]]]:
    """All that the executor may look up."""
    if isinstance(message, Handover):
        for spec in message.requests:
            yield spec.request, (*spec.prompt_ids, *spec.generated_ids)
    elif isinstance(message, Visit):
        for s in message.segments:
            yield s.request, (*s.token_ids, *s.prompt_ids, *s.generated_ids)
