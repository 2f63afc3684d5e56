"""Follows a controller step by step: which members are there, and what they hold.

The only reader of messages about holdings. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from livescale.control.state.config import ControllerConfig
from livescale.messages import commands, events
from livescale.telemetry.history import changes
from livescale.telemetry.history.holding_history import Ending, HoldingHistory, InstanceHistory
from livescale.telemetry.history.requests import RequestsFollowed
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import HoldingId, InstanceId, InstanceState, WorkerRef

_Joined = events.WorkerJoined | events.AgentJoined


class Follower:
    """What is there now. Histories that have ended are not kept: HoldingBegun hands each out."""

    def __init__(self) -> None:
        #: all models that were ever served, as they were published last
        self.policies: dict[str, ModelPolicy] = {}
        #: instances of which a member holds something
        self.instances: dict[InstanceId, InstanceHistory] = {}
        self._requests = RequestsFollowed()
        #: requests that were dispatched and have not ended, and where they are
        self.running = self._requests.running
        #: living members by number, as they joined
        self._members: dict[int, _Joined] = {}
        #: those of them that are to leave
        self._leaving: dict[WorkerRef, None] = {}
        self._holdings: dict[HoldingId, HoldingHistory] = {}
        self._has_begun_anew = False
        self._now_ns = 0
        self._changes: list[changes.Change] = []
        self._handlers: dict[type, Callable[[Any], object]] = {
            events.WorkerJoined: self._joined,
            events.AgentJoined: self._joined,
            events.WorkerLost: lambda event: self._lose(event.worker, event.reason),
            events.MembersLeave: self._to_leave,
            commands.StartHolding: self._start,
            commands.ReleaseHolding: self._of_held(self._released),
            events.FirstByteArrived: self._of_held(self._first_byte),
            events.LiveStarted: self._of_held(self._live),
            events.RoleChanged: self._of_held(self._has_role),
            events.LayerArrived: self._of_held(self._arrived),
            events.HoldingCompleted: self._of_held(self._completed),
            events.HoldingFailed: self._of_held(self._failed),
            events.HoldingDropped: self._of_held(self._dropped),
            events.InstanceReported: self._reported,
            events.BatchTaken: self._taken,
            events.KvTaken: self._kv_taken,
            commands.ChangeDuty: self._told,
            commands.Drain: self._draining,
            commands.Resume: self._draining,
            events.ModelAdded: self._model_added,
            commands.ScaleDecided: self._decided,
            events.RequestArrived: lambda event: self._requests.arrived(self._now_ns, event),
            commands.Dispatch: self._requests.dispatched,
            events.RequestEnded: self._requests.over,
            events.RequestCancelled: self._requests.over,
            events.GatewayLost: self._requests.gateway_lost,
            commands.FailRequest: self._requests.over,
        }

    def begin(self, config: ControllerConfig) -> None:
        """A life of the controller begins. Members that lived before have yet to join it."""
        self.policies |= {policy.spec.name: policy for policy in config.models}
        self._has_begun_anew = True

    def step(
        self,
        now_ns: int,
        received: Sequence[events.AnyEvent],
        ordered: Sequence[commands.AnyCommand],
    ) -> list[changes.Change]:
        """Take in the events and the commands of one step; what they changed, in order."""
        self._now_ns = now_ns
        self._changes = []
        if self._has_begun_anew:
            self._has_begun_anew = False
            for held in self._holdings.values():
                held.know(now_ns, is_known=False)
        for message in (*received, *ordered):
            self._handlers.get(type(message), self._changes.append)(message)
        return self._changes

    def on(self, member: WorkerRef) -> list[HoldingHistory]:
        """What a member holds, or is getting."""
        return [held for held in self._holdings.values() if held.member == member]

    def opening(self) -> tuple[list[events.AnyEvent], list[commands.Drain]]:
        """The step with which a further part of a record begins, so that it can be read without
        those before: all living members join with what they hold (but not from whom they get it),
        workers first, some are to leave, and the instances that drain are drained."""
        received: list[events.AnyEvent] = [
            msgspec.structs.replace(
                event, holdings=tuple(held.as_report() for held in self.on(_member_of(event)))
            )
            for _, event in sorted(self._members.items())
        ]
        if self._leaving:
            received.append(events.MembersLeave(tuple(self._leaving)))
        instances = self.instances.values()
        draining = [i.number for i in instances if i.state is InstanceState.DRAINING]
        return received, [commands.Drain(number) for number in draining]

    # -- members --------------------------------------------------------------------------------

    def _joined(self, event: _Joined) -> None:
        ref = _member_of(event)
        reported = {report.order.holding for report in event.holdings}
        before = self._members.get(ref.worker)
        if before is not None and _member_of(before) != ref:
            if _member_of(before) > ref:
                return  # late news
            self._lose(_member_of(before), f"{ref} took its place")
        for held in [h for h in self._holdings.values() if h.member.worker == ref.worker]:
            if held.member != ref:
                self._end(held, Ending.LOST, f"{ref} took its place")
            elif held.id not in reported:
                self._end(held, Ending.LOST, "it was not reported again")
        self._members[ref.worker] = event
        self._changes.append(changes.MemberJoined(ref))
        for report in event.holdings:
            order = report.order
            held = self._reported_holding(report)
            held.know(self._now_ns, is_known=True)
            held.watermark = max(held.watermark, report.watermark)
            if held.instance is not None and order.duty is not None:
                held.instance.tell(self._now_ns, order.duty)
                if order.duty.live_order:
                    held.instance.go_live(self._now_ns)
            if report.is_whole and not report.is_spare:
                self._whole(held, self._now_ns if held.whole_ns is None else held.whole_ns)

    def _reported_holding(self, report: events.HoldingReport) -> HoldingHistory:
        """The history of what a member reports when it joins, which may begin with that."""
        held = self._holdings.get(report.order.holding)
        if held is not None and held.is_spare == report.is_spare:
            return held
        if held is not None:
            # The order that makes the difference is not on record, or was lost.
            self._end(held, Ending.RELEASED, "")
        return self._begin(report.order, is_spare=report.is_spare)

    def _to_leave(self, event: events.MembersLeave) -> None:
        self._leaving |= dict.fromkeys(ref for ref in event.members if self._is_there(ref))

    def _lose(self, ref: WorkerRef, reason: str) -> None:
        """The member is gone. That it was allowed to go is not on record, but nothing is lost with
        one that leaves when it has no part in an instance and no requests."""
        is_there, held_there = self._is_there(ref), self.on(ref)
        requests = self._requests.lost(ref) if is_there else 0
        is_idle = not requests and all(held.instance is None for held in held_there)
        has_left = ref in self._leaving and is_idle
        for held in held_there:
            self._end(held, Ending.LEFT if has_left else Ending.LOST, reason)
        if is_there:
            del self._members[ref.worker]
            self._leaving.pop(ref, None)
            gone = changes.MemberGone(ref, reason, tuple(held_there), requests, has_left)
            self._changes.append(gone)

    def _is_there(self, ref: WorkerRef) -> bool:
        joined = self._members.get(ref.worker)
        return joined is not None and _member_of(joined) == ref

    # -- holdings -------------------------------------------------------------------------------

    def _start(self, order: commands.StartHolding) -> None:
        spare = HoldingId(order.spare, order.holding.member) if order.spare is not None else None
        if spare in self._holdings:
            self._end(self._holdings[spare], Ending.REUSED, "")
        self._begin(order, is_ordered=True)

    def _begin(
        self, order: commands.StartHolding, *, is_ordered: bool = False, is_spare: bool = False
    ) -> HoldingHistory:
        """A copy or a rank of an instance begins, or a warm spare, of which all is there."""
        now_ns, duty, instance = self._now_ns, order.duty, None
        if duty is not None and not is_spare:
            new = InstanceHistory(duty, order.model, [(now_ns, InstanceState.LOADING)])
            instance = self.instances.setdefault(duty.instance, new)
        policy = self.policies.get(order.model)
        held = HoldingHistory(
            order=order,
            instance=instance,
            begun_ns=now_ns,
            is_ordered=is_ordered,
            layer_bytes=() if policy is None else policy.spec.layer_bytes,
            is_spare=is_spare,
            known_ns=[now_ns],
            watermark=order.span.stop if is_spare else 0,
            whole_ns=now_ns if is_spare else None,
        )
        self._holdings[held.id] = held
        if instance is not None:
            instance.holdings.append(held)
        self._changes.append((changes.SpareBegun if is_spare else changes.HoldingBegun)(held))
        return held

    def _of_held(self, handle: Callable[[HoldingHistory, Any], None]) -> Callable[[Any], None]:
        """Messages about a holding: those about one that is not there any more are late."""

        def taken_in(message: Any) -> None:
            held = self._holdings.get(message.holding)
            if held is not None:
                handle(held, message)

        return taken_in

    def _released(self, held: HoldingHistory, _: commands.ReleaseHolding) -> None:
        """The holding ends, and a warm spare begins; but its rank may have been one already."""
        if not held.is_spare:
            self._end(held, Ending.RELEASED, "")
            self._begin(held.order, is_spare=True)

    def _first_byte(self, held: HoldingHistory, _: events.FirstByteArrived) -> None:
        if held.first_byte_ns is None:
            held.first_byte_ns = self._now_ns

    def _live(self, held: HoldingHistory, _: events.LiveStarted) -> None:
        if held.instance is not None:
            held.live_ns = self._now_ns if held.live_ns is None else held.live_ns
            held.instance.go_live(self._now_ns)

    def _arrived(self, held: HoldingHistory, event: events.LayerArrived) -> None:
        held.arrive(self._now_ns, event.layer, event.watermark, event.live_layers)

    def _completed(self, held: HoldingHistory, event: events.HoldingCompleted) -> None:
        held.received_bytes = event.received_bytes
        self._whole(held, self._now_ns)

    def _failed(self, held: HoldingHistory, event: events.HoldingFailed) -> None:
        self._end(held, Ending.FAILED, event.reason)

    def _dropped(self, held: HoldingHistory, _: events.HoldingDropped) -> None:
        self._end(held, Ending.RELEASED, "")

    def _whole(self, held: HoldingHistory, whole_ns: int) -> None:
        held.whole_ns, held.watermark = whole_ns, len(held.layer_bytes)
        if held.instance is not None and held.instance.is_whole:
            held.instance.enter(self._now_ns, InstanceState.SERVING)
        self._changes.append(changes.HoldingWhole(held))

    def _end(self, held: HoldingHistory, ending: Ending, reason: str) -> None:
        del self._holdings[held.id]
        held.end(self._now_ns, ending, reason)
        instance = held.instance
        if instance is not None and all(h.ended_ns is not None for h in instance.holdings):
            self.instances.pop(instance.number, None)
        change = changes.SpareEnded if held.is_spare else changes.HoldingEnded
        self._changes.append(change(held))

    # -- instances ------------------------------------------------------------------------------

    def _reported(self, event: events.InstanceReported) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        if event.emitted_tokens and instance.first_token_ns is None:
            instance.first_token_ns = self._now_ns
            self._changes.append(changes.FirstToken(instance))
        instance.emitted_tokens = max(instance.emitted_tokens, event.emitted_tokens)
        if event.stage is not None:
            instance.visits.append((self._now_ns, event.stage))

    def _told(self, command: commands.ChangeDuty) -> None:
        held = self._holdings.get(command.holding)
        if held is not None and held.instance is not None:
            held.instance.tell(self._now_ns, command.duty)
        self._changes.append(command)

    def _has_role(self, held: HoldingHistory, event: events.RoleChanged) -> None:
        if held.instance is not None:
            held.instance.has_role(self._now_ns, event.role)

    def _taken(self, event: events.BatchTaken) -> None:
        self._requests.taken(event)
        instance = self.instances.get(event.target)
        if instance is not None:
            instance.hand_over(self._now_ns, event, self.instances.get(event.instance))

    def _kv_taken(self, event: events.KvTaken) -> None:
        instance = self.instances.get(event.instance)
        if instance is not None:
            instance.kv.append(event)

    def _draining(self, command: commands.Drain | commands.Resume) -> None:
        instance = self.instances.get(command.instance)
        if instance is not None:
            is_drain = isinstance(command, commands.Drain)
            state = InstanceState.DRAINING if is_drain else InstanceState.SERVING
            instance.enter(self._now_ns, state)
        self._changes.append(command)

    # -- models ---------------------------------------------------------------------------------

    def _model_added(self, event: events.ModelAdded) -> None:
        self.policies[event.policy.spec.name] = event.policy
        self._changes.append(event)

    def _decided(self, command: commands.ScaleDecided) -> None:
        is_first = not command.from_instances
        first = self._requests.first_waiting(command.model) if is_first else (None, None)
        self._changes.append(changes.Decided(command, *first))


# -- helpers --------------------------------------------------------------------------------------


def _member_of(joined: _Joined) -> WorkerRef:
    return joined.agent if isinstance(joined, events.AgentJoined) else joined.worker
