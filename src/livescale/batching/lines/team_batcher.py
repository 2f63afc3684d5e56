"""A Serving that may be part of a team while its layers arrive: around what serves alone.

As the first member it leads: requests that come are decided here, and their Runs visit the others.
As any member it runs what visits (`team_side.py`). With all layers the team ends,
and the instance serves alone as any other (λScale §4.4, mode switch): requests that decode go to
the members in even shares, and their KV with them (`team_parting.py`), or are computed anew from
their tokens, at the leader or where the router sends them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.contract.serving import Capabilities, KvCame, KvPlaces, Serving
from livescale.batching.contract.visit_messages import Broken, Disbanded, Kept, Visit, VisitMessage
from livescale.batching.lines.team_side import TeamSide
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.messages.events import InstanceReported, TeamBroke
from livescale.values.routes import Partner, Taker, Team
from livescale.values.types import LayerSpan, RequestId, WorkerRef


class TeamBatcher(Serving):
    """`inner` is the instance's own, with all of its requests before and after a team."""

    def __init__(self, inner: LiveBatcher) -> None:
        self.inner = inner
        #: layers that are here, beyond the watermark, too
        self._present: dict[int, None] = {}
        self.side = TeamSide(inner, self.has)

    # -- teams ----------------------------------------------------------------------------------

    def join(self, team: Team | None) -> None:
        self.side.join(team)

    @property
    def team_broke(self) -> TeamBroke | None:
        return self.side.broke

    def layer_came(self, layer: int) -> None:
        """The layer is complete and may be run; those before it may be missing."""
        self._present[layer] = None

    # -- a Serving ------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        can = self.inner.capabilities
        if self.side.team is None and self.side.is_idle:
            return can
        return Capabilities(False, can.kv_blocks, can.prefill_tokens_per_s)

    def layers_arrived(self, watermark: int) -> None:
        self.inner.layers_arrived(watermark)

    def add(self, spec: SequenceSpec) -> None:
        for request, attempt in [pair for pair in self.requests() if pair[0] == spec.request]:
            if attempt >= spec.attempt:
                raise ValueError(f"request {request} is on this instance in a later attempt")
            self.cancel(request, attempt)
        self.inner.batcher.check(spec)
        if not self.side.add(spec):
            self.inner.add(spec)

    def cancel(self, request: RequestId, attempt: int) -> bool:
        return self.side.cancel(request, attempt) or self.inner.cancel(request, attempt)

    def requests(self) -> list[tuple[RequestId, int]]:
        return self.side.requests() + self.inner.requests()

    def give_back(self) -> list[tuple[RequestId, int]]:
        own = self.side.requests() + self.inner.give_back()
        self.side.leave()
        return own

    def next(self, steps_max: int = 1) -> Run | None:
        run = self.side.next()
        if run is not None or self.side.visitors.in_flight:
            return run
        # A Run of several steps counts on blocks that a leader may give back meanwhile.
        return self.inner.next(steps_max if self.side.is_idle else 1)

    def shorten(self, run: Run, steps: int) -> Run:
        return self.inner.shorten(run, steps)

    def fail(self, run: Run, faulty: Sequence[FaultyRequest]) -> None:
        if self.side.visitors.is_next(run):
            self.side.visitors.fail(faulty)
        else:
            self.inner.fail(run, faulty)

    def take_refused(self) -> list[tuple[RequestId, int, str]]:
        return self.side.take_refused() + self.inner.take_refused()

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        if not self.side.visitors.is_next(run):
            return self.inner.done(run, token_ids, elapsed_ns)
        self.inner.pace.ran(run, elapsed_ns, run.prefill_tokens)
        return self.side.done(tuple(token_id for (token_id,) in token_ids))

    def take_emitted(self) -> list[EmittedTokens]:
        return self.side.take_emitted()

    @property
    def tells_layers(self) -> bool:
        return self.inner.tells_layers

    def layers_ran(self, stop: int) -> None:
        self.inner.layers_ran(stop)

    def report(self) -> InstanceReported:
        own, lead = self.inner.report(), self.side.lead
        tokens = own.emitted_tokens + self.side.past_tokens
        if lead is None or lead.batcher is None:
            return msgspec.structs.replace(own, emitted_tokens=tokens)
        pace = self.inner.pace
        led = lead.batcher.report(own.instance, own.handovers, pace.prefill_tokens, pace.prefill_ns)
        return msgspec.structs.replace(
            led,
            admitted=led.admitted + own.admitted,
            started=led.started + own.started,
            emitted_tokens=led.emitted_tokens + tokens,
        )

    # -- partners -------------------------------------------------------------------------------

    def work_alone(self) -> None:
        self.inner.work_alone()

    def drain_to(self, takers: Sequence[Taker]) -> None:
        self.inner.drain_to(takers)

    def decode_at(self, partners: Sequence[Partner], *, keeps: bool = False) -> None:
        self.inner.decode_at(partners, keeps=keeps)

    def take_returned(self) -> list[tuple[RequestId, int]]:
        return self.side.take_returned() + self.inner.take_returned()

    @property
    def is_alone(self) -> bool:
        return self.side.is_alone and self.inner.is_alone

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        if isinstance(message, Visit):
            return message.rows if self.side.visitors.expects(message) else None
        if isinstance(message, VisitMessage):
            return None
        return self.inner.expected_tokens(peer, message)

    def may_come(self, peer: WorkerRef, message: LiveMessage) -> bool:
        if isinstance(message, Disbanded | Broken | Kept):
            return not self.side.visitors.in_flight
        if isinstance(message, VisitMessage):
            return True
        return self.inner.may_come(peer, message)

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, came_ns: int | None = None
    ) -> int | None:
        is_teams, pull_ns = self.side.take_message(peer, message)
        return pull_ns if is_teams else self.inner.take_message(peer, message, now_ns, came_ns)

    def take_kv_came(self) -> list[KvCame]:
        return self.inner.take_kv_came()

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        self.inner.peer_lost(peer, is_reachable=is_reachable)
        self.side.lost(peer)

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        return [*self.side.take_outbox(now_ns), *self.inner.take_outbox(now_ns)]

    def deadline_ns(self) -> int | None:
        deadlines = (self.side.deadline_ns(), self.inner.deadline_ns())
        return min((at_ns for at_ns in deadlines if at_ns is not None), default=None)

    def holds(self, key: BatchKey) -> bool:
        return self.side.visitors.holds(key) or self.inner.holds(key)

    def kv_places(self, key: BatchKey) -> KvPlaces:
        places = self.side.visitors.part(key)
        return places if places is not None else self.inner.kv_places(key)

    def has(self, span: LayerSpan) -> bool:
        """All of these layers are here."""
        missing = range(max(span.start, self.inner.watermark), span.stop)
        return all(layer in self._present for layer in missing)

    @property
    def kv_in_use(self) -> int:
        """Blocks of requests, and of what visits."""
        return self.inner.batcher.pool.used

    def validate(self) -> None:
        """Check all parts against each other. Raises AssertionError."""
        self.inner.validate()
        lead = self.side.lead
        if lead is not None and lead.batcher is not None:
            lead.batcher.validate()
