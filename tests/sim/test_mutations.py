"""The swarm finds bugs: the controller is broken on purpose, and some seed must say so.

Each mutation takes one rule out of the production controller. It is caught by the rule named
beside it, which is stated from the outside; unbroken, the same seeds pass (`test_swarm.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from effort import mostly_long
from livescale.batching.live.decode_giver import DecodeGiver
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.blocks import BlockPool
from livescale.batching.runs.kv_room import KvRoom
from livescale.batching.runs.run import EmittedTokens
from livescale.batching.runs.sequence import SequenceState
from livescale.common.fair_line import FairLine
from livescale.control import controller as controller_module
from livescale.control.cluster.departures import Departures
from livescale.control.cluster.host_ledger import HostLedger
from livescale.control.cluster.incarnations import Incarnations
from livescale.control.cluster.liveness import SilenceWatch
from livescale.control.cluster.next_step import NextStep
from livescale.control.cluster.wanted_hosts import WantedHosts
from livescale.control.controller import Controller
from livescale.control.multicast import chain
from livescale.control.multicast import repair as repair_module
from livescale.control.planning.host_copies import HostCopies
from livescale.control.planning.loads import Loads
from livescale.control.planning.spares import Spares
from livescale.control.policy.placement import HostRoom
from livescale.control.requests.attempts import Attempts
from livescale.control.requests.client_queues import ClientQueues
from livescale.control.requests.router import ClientShare, Router
from livescale.control.requests.router_rows import Outstanding, RequestRecord, RouteRow
from livescale.control.scaling.leaving import Leaving
from livescale.control.scaling.scaling import Scaling
from livescale.control.scaling.wishes import Wish
from livescale.control.scaling.withdrawals import Withdrawals
from livescale.control.state.config import ControllerConfig
from livescale.control.state.fleet import Fleet
from livescale.control.state.holdings import Copy, HoldingState
from livescale.control.state.idle_workers import IdleWorkers, WorkerRecord
from livescale.control.state.instance import TRANSITIONS, Instance
from livescale.control.state.load_failures import LoadFailures
from livescale.control.state.model_state import ModelState, PartState
from livescale.control.state.pool import ParameterPool
from livescale.control.state.reads import Reads
from livescale.control.together.drains import Drains
from livescale.control.together.pairing import Pairings
from livescale.control.together.roles import Roles
from livescale.main import main
from livescale.member.inputs import LayerCame
from livescale.member.member import Member
from livescale.member.member_holdings import ModelHolding
from livescale.member.waits import Waits
from livescale.messages.commands import (
    AnyCommand,
    ChangeDuty,
    Dispatch,
    Drain,
    DropHolding,
    ModelGone,
    ScaleDecided,
    StartHolding,
)
from livescale.messages.events import (
    AnyEvent,
    GatewayLost,
    HoldingCompleted,
    LayerArrived,
    ModelChanged,
    RequestArrived,
    RequestEnded,
    WorkerLost,
)
from livescale.sim.swarm.seeds import run_seed
from livescale.values.routes import Duty, Hop, Partner, Route, Taker
from livescale.values.types import InstanceState, PlanId, Role, WorkerRef, gateway_of

SEEDS = range(400)

Break = Callable[[pytest.MonkeyPatch], None]


def attempts_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """The end of an earlier attempt ends the one under way."""
    ended = Attempts.ended

    def broken(self: Attempts, event: RequestEnded, now_ns: int) -> bool:
        record = self._router.requests.get(event.request)
        attempt = record.attempt if record is not None else event.attempt
        return ended(self, msgspec.structs.replace(event, attempt=attempt), now_ns)

    patch.setattr(Attempts, "ended", broken)


def draining_instances_are_released_early(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Scaling, instance: Instance) -> bool:
        return False

    patch.setattr(Scaling, "_is_busy", broken)


def the_last_copy_may_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParameterPool, "is_last", lambda self, copy: False)


def copies_that_are_read_may_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "are_of", lambda self, copy: False)


def losses_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A lost worker's instance is kept."""

    init = Controller.__init__

    def broken(self: Controller, config: ControllerConfig) -> None:
        init(self, config)
        self._handlers[WorkerLost] = lambda event, now_ns: True

    patch.setattr(Controller, "__init__", broken)


def changed_limits_are_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A model goes on with the limits that it was published with."""
    init = Controller.__init__

    def broken(self: Controller, config: ControllerConfig) -> None:
        init(self, config)
        self._handlers[ModelChanged] = lambda event, now_ns: True

    patch.setattr(Controller, "__init__", broken)


def nobody_asks_to_be_woken(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Controller, *, at_once: bool) -> None:
        return

    patch.setattr(Controller, "_ask_to_wake", broken)


def loading_instances_get_requests(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Controller, state: PartState) -> None:
        part = state.part
        loading = [i.partner for i in self.fleet.of_part(part) if i.is_capacity]
        routes = [Route((Hop((partner,), part.span),)) for partner in loading]
        for assignment in self.router.assign(self._now_ns, part, routes):
            record = assignment.request
            self._commands.append(
                Dispatch(record.id, record.attempt, assignment.instance, assignment.worker)
            )

    patch.setattr(Controller, "_dispatch", broken)


def failed_feeds_are_not_replaced(patch: pytest.MonkeyPatch) -> None:
    def broken(loads: Loads, pool: object, topology: object, now_ns: int) -> list[object]:
        loads.repaired()
        return []

    patch.setattr(controller_module, "repair_loads", broken)


def workers_are_given_out_twice(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Fleet, arena_bytes: int, *, engines: bool = True) -> list[WorkerRecord]:
        return [self.workers[number] for number in sorted(self.workers)]

    patch.setattr(Fleet, "idle", broken)


def leftovers_are_released_again(patch: pytest.MonkeyPatch) -> None:
    drop = Copy.drop

    def broken(self: Copy, reason: str) -> list[DropHolding]:
        drop(self, reason)
        return [DropHolding(holding.id, reason) for holding in self.ranks.values()]

    patch.setattr(Copy, "drop", broken)


def leftovers_are_dropped_last(patch: pytest.MonkeyPatch) -> None:
    """What can never be whole stays until something was ordered to its place."""
    decide = Controller._decide

    def broken(self: Controller) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self.pool, "drop_remainders", lambda: [])
            decide(self)
        self._commands += self.pool.drop_remainders()

    patch.setattr(Controller, "_decide", broken)


def one_rank_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Copy) -> bool:
        return self.is_there and any(holding.is_whole for holding in self.ranks.values())

    def broken_too(self: Copy) -> bool:
        states = [holding.state for holding in self.ranks.values()]
        return self.is_there and HoldingState.WHOLE in states

    patch.setattr(Copy, "is_complete", property(broken))
    patch.setattr(Copy, "is_loaded", property(broken_too))


def spares_stay_where_others_come(patch: pytest.MonkeyPatch) -> None:
    give_way = Spares.give_way

    def broken(
        self: Spares, targets: Sequence[Sequence[WorkerRef]], state: ModelState
    ) -> tuple[dict[WorkerRef, int], list[AnyCommand]]:
        return give_way(self, targets, state)[0], []

    patch.setattr(Spares, "give_way", broken)


def models_lie_on_spares(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParameterPool, "gap", lambda self, member, size, memory, without=(): 0)


def spares_of_withdrawn_models_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Spares, "drop_unwanted", lambda self: [])


def orders_do_not_name_the_spare(patch: pytest.MonkeyPatch) -> None:
    """Its bytes would be there twice."""
    take_up = ParameterPool.take_up

    def broken(self: ParameterPool, copy: Copy, orders: list[StartHolding]) -> Copy:
        for order in orders:
            msgspec.structs.force_setattr(order, "spare", None)
        return take_up(self, copy, orders)

    patch.setattr(ParameterPool, "take_up", broken)


def draining_instances_get_requests(patch: pytest.MonkeyPatch) -> None:
    routes = Pairings.routes

    def broken(self: Pairings, now_ns: int, state: PartState) -> list[Route]:
        draining = [i for i in self._fleet.draining.values() if i.model == state.spec.name]
        staying = [i.partner for i in draining if not i.is_released]
        more = [Route((Hop((partner,), state.part.span),)) for partner in staying]
        return [*routes(self, now_ns, state), *more]

    patch.setattr(Pairings, "routes", broken)


def the_last_that_serves_may_go(patch: pytest.MonkeyPatch) -> None:
    """Others load, and no instance serves meanwhile."""

    def broken(self: Scaling, state: PartState) -> int:
        return len(self._pairings.unpaired(state.part))

    patch.setattr(Scaling, "_drainable", broken)


def stages_give_one_more_than_they_may(patch: pytest.MonkeyPatch) -> None:
    """Whatever their least number is."""
    shrink = Scaling._shrink

    def broken(self: Scaling, wish: Wish) -> Sequence[AnyCommand]:
        if wish.state.spec.stage is not None:
            wish = dataclasses.replace(wish, wanted=max(wish.wanted - 1, 0))
        return shrink(self, wish)

    patch.setattr(Scaling, "_shrink", broken)


def stages_grow_without_their_numbers(patch: pytest.MonkeyPatch) -> None:
    notice = Wish.notice

    def broken(self: Wish, before: int, after: int, reason: str) -> ScaleDecided:
        return msgspec.structs.replace(notice(self, before, after, reason), values={})

    patch.setattr(Wish, "notice", broken)


def drains_are_kept_secret(patch: pytest.MonkeyPatch) -> None:
    shrink = Scaling._shrink

    def broken(self: Scaling, wish: Wish) -> Sequence[AnyCommand]:
        return [c for c in shrink(self, wish) if not isinstance(c, Drain)]

    patch.setattr(Scaling, "_shrink", broken)


def attempts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A request that goes elsewhere keeps the number of its first attempt."""
    retry = Router.retry

    def broken(self: Router, record: RequestRecord) -> None:
        retry(self, record)
        record.attempt -= 1

    patch.setattr(Router, "retry", broken)


def the_first_layer_is_taken_for_the_last(patch: pytest.MonkeyPatch) -> None:
    moves = dict(TRANSITIONS[InstanceState.LOADING])
    moves[LayerArrived] = InstanceState.SERVING
    serving = {**TRANSITIONS[InstanceState.SERVING], LayerArrived: InstanceState.SERVING}
    serving[HoldingCompleted] = InstanceState.SERVING
    patch.setitem(TRANSITIONS, InstanceState.LOADING, moves)
    patch.setitem(TRANSITIONS, InstanceState.SERVING, serving)


def host_memory_seems_endless(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostCopies) -> list[HostRoom]:
        return [HostRoom(record.ref, 1 << 50) for record in self._fleet.living_agents()]

    patch.setattr(HostCopies, "_rooms", broken)


def models_with_instances_are_given_up(patch: pytest.MonkeyPatch) -> None:
    """The living instances of a model whose loads fail are not looked at."""
    fail_unloadable = Controller._fail_unloadable

    def broken(self: Controller) -> None:
        of_part, self.fleet.of_part = self.fleet.of_part, lambda part: []
        fail_unloadable(self)
        self.fleet.of_part = of_part

    patch.setattr(Controller, "_fail_unloadable", broken)


def the_first_failed_load_is_the_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadFailures, "problem", property(lambda self: self._reason or None))


def requests_are_served_by_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """Whoever sends much is served much."""
    in_turn = ClientQueues.in_turn

    def broken(
        self: ClientQueues[RequestRecord], sated: Container[str] = ()
    ) -> Iterator[RequestRecord]:
        by_order = sorted(in_turn(self), key=lambda record: record.order)
        return (record for record in by_order if record.client not in sated)

    patch.setattr(ClientQueues, "in_turn", broken)


def weights_are_not_heeded(patch: pytest.MonkeyPatch) -> None:
    """A turn is worth as many requests as anybody's."""
    arrive = Router.arrive

    def broken(self: Router, *args: object, client: ClientShare, **named: object) -> RequestRecord:
        heavier = client._replace(weight=client.weight + 1)
        return arrive(self, *args, client=heavier, **named)

    patch.setattr(Router, "arrive", broken)


def given_back_counts_as_lost(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Attempts, record: RequestRecord, now_ns: int) -> None:
        self._attempt_failed(record, "it was given back", is_spared=False)

    patch.setattr(Attempts, "_returned", broken)


def attempts_of_earlier_lives_count_as_lost(patch: pytest.MonkeyPatch) -> None:
    arrived = Attempts.arrived

    def broken(self: Attempts, event: RequestArrived, now_ns: int) -> bool:
        is_known = event.request in self._router.requests
        is_news = arrived(self, event, now_ns)
        record = self._router.requests.get(event.request)
        if record is not None and not is_known:
            record.failures = event.attempt
        return is_news

    patch.setattr(Attempts, "arrived", broken)


def loads_that_fail_together_count_each(patch: pytest.MonkeyPatch) -> None:
    failed = LoadFailures.failed

    def broken(
        self: LoadFailures,
        now_ns: int,
        plan: PlanId,
        newest: PlanId,
        reason: str,
        **beside: bool,
    ) -> None:
        self._newest = 0
        failed(self, now_ns, plan, newest, reason, **beside)

    patch.setattr(LoadFailures, "failed", broken)


def models_go_with_their_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Withdrawals, "_is_left", lambda self, model: self._pool.has_any(model.name))


def stages_go_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Those of a withdrawn model do not wait for each other."""

    def broken(self: Withdrawals) -> list[ModelGone]:
        leaving = [self._states[name] for name in self._leaving]
        gone = [model for model in leaving if not self._is_left(model)]
        for model in gone:
            self._forget(model)
        return [ModelGone(model.name) for model in gone]

    patch.setattr(Withdrawals, "let_go", broken)


def clients_below_their_share_are_refused(patch: pytest.MonkeyPatch) -> None:
    def broken(self: FairLine, client: str, more: int, own: int, total: int, most: int) -> bool:
        return not total or total + more <= most

    patch.setattr(FairLine, "_takes", broken)


def the_line_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairLine, "takes_requests", lambda self, client, requests: True)


def the_line_keeps_the_places_of_those_who_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairLine, "remove", lambda self, client, requests, prompt_tokens: None)


def instances_refuse_what_they_could_hold(patch: pytest.MonkeyPatch) -> None:
    held_max = Batcher.tokens_held_max
    patch.setattr(Batcher, "tokens_held_max", lambda self: held_max(self) // 4)


def finished_requests_keep_their_kv(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Batcher, sequence: SequenceState) -> None:
        del self.lines.running[sequence.spec.request]

    patch.setattr(Batcher, "_retire", broken)


def tokens_are_numbered_from_one(patch: pytest.MonkeyPatch) -> None:
    emit = SequenceState.emit

    def broken(self: SequenceState, token_ids: Sequence[int]) -> EmittedTokens:
        emitted = emit(self, token_ids)
        return msgspec.structs.replace(emitted, index=emitted.index + 1)

    patch.setattr(SequenceState, "emit", broken)


def the_preempted_forget_their_tokens(patch: pytest.MonkeyPatch) -> None:
    preempt = KvRoom._preempt_latest

    def broken(self: KvRoom, lacking: SequenceState, busy: Container[object]) -> bool:
        is_preempted = preempt(self, lacking, busy)
        if is_preempted:
            next(iter(self._lines.waiting.values())).generated.clear()
        return is_preempted

    patch.setattr(KvRoom, "_preempt_latest", broken)


def reports_exceed_the_kv_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "used", property(lambda self: self.blocks + 1))


def copies_of_the_lost_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParameterPool, "lose", lambda self, worker: None)


def plans_leave_the_last_chunk_out(patch: pytest.MonkeyPatch) -> None:
    """A chain brings all but the end of the model."""
    give = chain.give

    def broken(feeds: object, sender: object, receiver: object, chunks: object) -> None:
        *others, last = chunks  # type: ignore[misc]
        shorter = msgspec.structs.replace(last, stop=last.stop - last.step)
        give(feeds, sender, receiver, (*others, shorter))  # type: ignore[arg-type]

    patch.setattr(chain, "give", broken)


def repairs_go_in_circles(patch: pytest.MonkeyPatch) -> None:
    """Members are fed by those that wait for them."""
    patch.setattr(repair_module, "waits_for", lambda feeds_of, waiting, other, chunks: False)


def failed_copies_keep_their_readers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loads, "fail_readers", lambda self, sender, model: None)


def receivers_are_asked_to_feed_themselves(patch: pytest.MonkeyPatch) -> None:
    def broken(
        receiver: WorkerRef, holders: Sequence[WorkerRef], topology: object, readers: object
    ) -> list[WorkerRef]:
        return [receiver, *holders]

    patch.setattr(repair_module, "nearest", broken)


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SilenceWatch, "look", lambda self, now_ns: ())


def members_are_given_up_early(patch: pytest.MonkeyPatch) -> None:
    """Half of the time that a peer may be silent is too much."""
    received = SilenceWatch.received

    def broken(self: SilenceWatch[object], peer: object, at_ns: int) -> None:
        received(self, peer, at_ns - self.lost_after_ns // 2)

    patch.setattr(SilenceWatch, "received", broken)


def arenas_seem_endless(patch: pytest.MonkeyPatch) -> None:
    idle, gap = Fleet.idle, ParameterPool.gap
    patch.setattr(Fleet, "idle", lambda self, arena_bytes, **more: idle(self, 0, **more))
    patch.setattr(
        ParameterPool,
        "gap",
        lambda self, member, size, memory, without=(): gap(self, member, size, 1 << 60, without),
    )


def requests_go_to_any_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Instance, "worker", property(lambda self: self.workers[-1]))


def layers_are_told_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    came = Member._layer_came

    def broken(self: Member, holding: ModelHolding, news: LayerCame) -> None:
        came(self, holding, LayerCame(news.plan, news.layer + 1))

    patch.setattr(Member, "_layer_came", broken)


def draining_instances_pass_requests_to_each_other(patch: pytest.MonkeyPatch) -> None:
    takers = Drains._takers

    def broken(self: Drains, instance: Instance) -> tuple[Taker, ...]:
        others = [other for other in self._fleet.draining.values() if other is not instance]
        near = [Taker(other.partner) for other in others if other.part == instance.part]
        return (*takers(self, instance), *near)

    patch.setattr(Drains, "_takers", broken)


def resumed_instances_pass_on_what_they_get(patch: pytest.MonkeyPatch) -> None:
    decide = Drains.decide

    def broken(self: Drains) -> list[ChangeDuty]:
        return [order for order in decide(self) if order.duty.drains_to]

    patch.setattr(Drains, "decide", broken)


def instances_get_all_that_waits(patch: pytest.MonkeyPatch) -> None:
    """As with early binding, but without its bound."""
    patch.setattr(RouteRow, "fits", lambda self, tokens: self.room > 0)


def deaths_of_those_who_load_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadFailures, "died", lambda *_: None)


def what_is_computed_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """The router takes what was begun off what is left of it, as reported."""

    def broken(self: Outstanding) -> int:
        return max(self.unstarted_tokens - 2 * self.begun_tokens, 0)

    patch.setattr(Outstanding, "uncomputed_tokens", property(broken))


def hosts_go_before_their_members_are_back(patch: pytest.MonkeyPatch) -> None:
    begin = Departures.begin
    patch.setattr(Departures, "begin", lambda self, host, members: begin(self, host, 0))


def instances_do_not_hold_their_hosts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leaving, "_may_go", lambda self, ref: True)


def those_who_leave_get_instances(patch: pytest.MonkeyPatch) -> None:
    listed = IdleWorkers.listed

    def broken(self: IdleWorkers, arena_bytes: int, *, engines: bool) -> list[WorkerRecord]:
        leaving, self._leaving = self._leaving, {}
        found = listed(self, arena_bytes, engines=engines)
        self._leaving = leaving
        return found

    patch.setattr(IdleWorkers, "listed", broken)


def lost_gateways_leave_their_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attempts, "gateway_lost", lambda self, event, now_ns: True)


def lost_gateways_leave_what_workers_have(patch: pytest.MonkeyPatch) -> None:
    """Of their requests those are forgotten that wait, and no others."""

    def broken(self: Attempts, event: GatewayLost, now_ns: int) -> bool:
        known = [*self._router.requests.values()]
        for record in known:
            if gateway_of(record.id) == event.gateway and record.worker is None:
                self._router.end(record)
        return True

    patch.setattr(Attempts, "gateway_lost", broken)


def lost_gateways_take_the_requests_of_others(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Attempts, event: GatewayLost, now_ns: int) -> bool:
        for record in [*self._router.requests.values()]:
            self._router.end(record)
        return True

    patch.setattr(Attempts, "gateway_lost", broken)


def hosts_that_nothing_needs_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WantedHosts, "_idle", lambda self, now_ns, claims: ())


def hosts_that_are_needed_are_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controller, "busy_workers", lambda self: ())


def nobody_says_that_workers_are_lacking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controller, "lacking_workers", lambda self: 0)


def hosts_that_come_again_begin_with_their_first_lives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostLedger, "_again", lambda self, known, workers: known.numbers)


def hosts_that_left_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostLedger, name: str) -> None:
        del self._entries[name]

    patch.setattr(HostLedger, "leave", broken)


def the_gap_between_steps_is_dropped(patch: pytest.MonkeyPatch) -> None:
    init = NextStep.__init__
    patch.setattr(NextStep, "__init__", lambda self, gap_ns: init(self, 0))


def each_step_counts_as_the_call_that_was_asked_for(patch: pytest.MonkeyPatch) -> None:
    """And the controller waits for the one that it asked for."""
    begin = NextStep.begin

    def broken(self: NextStep, now_ns: int) -> list[AnyEvent]:
        absorbed = begin(self, now_ns)
        self._wake_at_ns = None
        return absorbed

    patch.setattr(NextStep, "begin", broken)


def incarnations_that_were_given_up_come_back(patch: pytest.MonkeyPatch) -> None:
    join = Incarnations.join

    def broken(self: Incarnations, member: WorkerRef) -> bool:
        if self.is_lost(member):
            del self._is_there[member]
        return join(self, member)

    patch.setattr(Incarnations, "join", broken)


def waits_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waits, "begin", lambda self, request, now_ns: None)


def mutated_instances_go_on_giving(patch: pytest.MonkeyPatch) -> None:
    """A prefill instance becomes a decode instance, and gives requests as before."""
    duty = Roles._duty

    def broken(self: Roles, instance: Instance) -> Duty:
        found = duty(self, instance)
        if found.role is Role.PREFILL:
            return found
        return msgspec.structs.replace(found, decodes_at=instance.duty.decodes_at)

    patch.setattr(Roles, "_duty", broken)


def decode_instances_that_load_or_drain_are_given_requests(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Roles, duty: Duty, model: ModelState) -> tuple[Partner, ...]:
        part = model.of_role(Role.DECODE).part
        return tuple(other.partner for other in self._fleet.of_part(part))

    patch.setattr(Roles, "_decoders", broken)


def held_requests_wait_for_decode_instances_that_left(patch: pytest.MonkeyPatch) -> None:
    """Where no decode instance is left, requests that were offered are not resumed."""
    decode_at = DecodeGiver.decode_at

    def broken(self: DecodeGiver, partners: Sequence[Partner], *, keeps: bool = False) -> None:
        if partners:
            decode_at(self, partners, keeps=keeps)
        else:
            self._takers = {}

    patch.setattr(DecodeGiver, "decode_at", broken)


class Mutation(NamedTuple):
    """What is broken, the rule that catches it, and a seed whose world shows it soon."""

    break_it: Break
    rule: str
    seed: int


#: `pytest --long -rP` prints the first seeds that show them, should worlds be drawn anew
MUTATIONS = [
    Mutation(requests_are_served_by_order_of_arrival, "another one gets one turn at most", 9),
    Mutation(weights_are_not_heeded, "another one gets one turn at most", 2),
    Mutation(attempts_are_not_checked, "after its last attempt|one attempt at a time", 4),
    Mutation(instances_get_all_that_waits, "gets what it computes next", 0),
    Mutation(what_is_computed_counts_twice, "gets what it computes next", 0),
    Mutation(attempts_are_not_counted, "attempts grow", 13),
    Mutation(draining_instances_are_released_early, "with requests is not released", 7),
    Mutation(the_last_copy_may_go, "the last copy is kept", 98),
    Mutation(copies_that_are_read_may_go, "a copy that is read from is kept", 36),
    Mutation(spares_stay_where_others_come, "holdings (fit|lie apart)", 7),
    Mutation(models_lie_on_spares, "holdings (fit|lie apart)", 7),
    Mutation(spares_of_withdrawn_models_stay, "were withdrawn and are not gone", 51),
    Mutation(orders_do_not_name_the_spare, "holdings lie apart", 15),
    Mutation(changed_limits_are_not_heeded, "comes to its least number of instances", 13),
    Mutation(losses_are_not_noticed, "only living members get orders|senders are alive", 0),
    Mutation(nobody_asks_to_be_woken, "every request ends", 14),
    Mutation(loading_instances_get_requests, "complete models serve", 0),
    Mutation(failed_feeds_are_not_replaced, "every request ends|every order is answered", 5),
    Mutation(workers_are_given_out_twice, "a worker is in one instance", 0),
    Mutation(leftovers_are_released_again, "orders are new", 0),
    Mutation(leftovers_are_dropped_last, "holdings fit their member's memory", 87),
    Mutation(one_rank_counts_for_all, "complete models serve", 0),
    Mutation(draining_instances_get_requests, "draining instances get no requests", 7),
    Mutation(the_last_that_serves_may_go, "the last instance that serves stays", 7),
    Mutation(stages_give_one_more_than_they_may, "stages keep their least number", 38),
    Mutation(stages_grow_without_their_numbers, "a stage that grows says why", 20),
    Mutation(drains_are_kept_secret, "states change along the table", 0),
    Mutation(the_first_layer_is_taken_for_the_last, "complete models serve", 0),
    Mutation(host_memory_seems_endless, "holdings fit their member's memory", 31),
    Mutation(models_with_instances_are_given_up, "requests of a model with instances wait", 157),
    Mutation(the_first_failed_load_is_the_last, "given up after failed loads", 1),
    Mutation(given_back_counts_as_lost, "after its last attempt is lost", 5),
    Mutation(attempts_of_earlier_lives_count_as_lost, "after its last attempt is lost", 194),
    Mutation(loads_that_fail_together_count_each, "given up after failed loads", 157),
    Mutation(deaths_of_those_who_load_do_not_count, "a pause follows a failed load", 5),
    Mutation(models_go_with_their_requests, "a model with requests stays|has requests", 55),
    Mutation(stages_go_one_by_one, "every request ends", 201434),
    Mutation(clients_below_their_share_are_refused, "a request fails that need not", 38),
    Mutation(the_line_has_no_end, "what must be refused is not accepted", 5),
    Mutation(the_line_keeps_the_places_of_those_who_left, "a request fails that need not", 5),
    Mutation(instances_refuse_what_they_could_hold, "a request fails that need not", 22),
    Mutation(finished_requests_keep_their_kv, "no KV is in use when all is over|every request", 9),
    Mutation(tokens_are_numbered_from_one, "each index comes once", 0),
    Mutation(the_preempted_forget_their_tokens, "each index comes once", 22),
    Mutation(reports_exceed_the_kv_pool, "KV blocks are not overdrawn", 0),
    Mutation(copies_of_the_lost_count, "every request ends", 0),
    Mutation(plans_leave_the_last_chunk_out, "every request ends|every order is answered", 2),
    Mutation(repairs_go_in_circles, "every request ends|every order is answered", 32),
    Mutation(failed_copies_keep_their_readers, "every request ends|every order is answered", 252),
    Mutation(receivers_are_asked_to_feed_themselves, "no member feeds itself", 0),
    Mutation(silence_is_not_noticed, "silence is noticed in time", 0),
    Mutation(members_are_given_up_early, "only the silent are given up", 0),
    Mutation(arenas_seem_endless, "holdings fit their member's memory", 7),
    Mutation(layers_are_told_before_they_are_there, "a layer counts when it is whole", 0),
    Mutation(requests_go_to_any_rank, "rank 0 gets the requests", 0),
    Mutation(draining_instances_pass_requests_to_each_other, "takers are whole and stay", 9),
    Mutation(resumed_instances_pass_on_what_they_get, "instances that serve keep", 40),
    Mutation(
        hosts_go_before_their_members_are_back, "on a worker that is let go|wants to leave", 138
    ),
    Mutation(instances_do_not_hold_their_hosts, "instances end before their host goes", 9),
    Mutation(those_who_leave_get_instances, "nothing new comes to those who leave", 72),
    Mutation(lost_gateways_leave_their_requests, "every (request|attempt) ends", 13),
    Mutation(lost_gateways_leave_what_workers_have, "every (request|attempt) ends", 13),
    Mutation(lost_gateways_take_the_requests_of_others, "every (request|attempt) ends", 13),
    Mutation(hosts_that_nothing_needs_are_kept, "does not come to rest", 62),
    Mutation(hosts_that_are_needed_are_given_back, "does not come to rest", 12),
    Mutation(nobody_says_that_workers_are_lacking, "least number of instances", 12),
    Mutation(hosts_that_come_again_begin_with_their_first_lives, "incarnations grow", 61),
    Mutation(hosts_that_left_are_forgotten, "hosts keep their numbers", 300),
    Mutation(the_gap_between_steps_is_dropped, "steps keep their gap", 0),
    Mutation(each_step_counts_as_the_call_that_was_asked_for, "least number of instances", 1),
    Mutation(incarnations_that_were_given_up_come_back, "joins a controller once", 0),
    Mutation(waits_never_end, "no request waits for too long", 3),
    Mutation(mutated_instances_go_on_giving, "only prefill instances give", 11),
    Mutation(
        decode_instances_that_load_or_drain_are_given_requests, "takers are whole and stay", 11
    ),
    Mutation(held_requests_wait_for_decode_instances_that_left, "every request ends", 41),
]


class _Calls(pytest.MonkeyPatch):
    """Refuses a function that cannot be called as the one it replaces."""

    def setattr(self, owner: Any, name: str, value: Any) -> None:  # type: ignore[override]
        replaced = getattr(owner, name)
        if inspect.isfunction(replaced) and inspect.isfunction(value):
            parameters = inspect.signature(replaced).parameters.values()
            in_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            by_name = {p.name: p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            inspect.signature(value).bind(*in_place, **by_name)
        super().setattr(owner, name, value)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.break_it.__name__)
def test_what_is_broken_is_called_as_before(mutation: Mutation) -> None:
    """Else a mutation breaks its own call, of which only `make long` tries all."""
    with _Calls.context() as patch:
        mutation.break_it(patch)


@pytest.mark.parametrize(
    "mutation",
    mostly_long(MUTATIONS, MUTATIONS[::3]),
    ids=lambda mutation: mutation.break_it.__name__,
)
def test_the_world_of_a_seed_shows_it(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.break_it(monkeypatch)
    outcome = run_seed(mutation.seed)
    assert re.search(mutation.rule, outcome.error), outcome.trace or "nothing is noticed"


@pytest.mark.long
@pytest.mark.timeout(1800)  # rare ones need hundreds of seeds
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.break_it.__name__)
def test_some_seed_shows_it(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """And which, when that of the table does not show it any more."""
    mutation.break_it(monkeypatch)
    broken = (outcome for outcome in map(run_seed, (mutation.seed, *SEEDS)) if outcome.error)
    found = next((o for o in broken if re.search(mutation.rule, o.error)), None)
    assert found is not None, f"no seed of {SEEDS} shows it"
    print(f"seed {found.seed}: {found.error[:160]}")


def test_a_failing_seed_is_told_with_the_command_that_runs_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loading_instances_get_requests(monkeypatch)
    figures = tmp_path / "swarm.json"
    code = main(["swarm", "--seeds", "3", "--jobs", "1", "--json", str(figures)])
    said = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert code == 1
    assert found["violations"] == len(found["failing"]) > 0
    for seed in found["failing"]:
        assert f"livescale swarm --seed {seed}\n" in said
    again = main(["swarm", "--seed", str(found["failing"][0])])
    said = capsys.readouterr().out
    assert again == 1
    assert "complete models serve" in said
    assert "Traceback" in said
