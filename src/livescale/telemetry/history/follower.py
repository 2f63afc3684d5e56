"""Follows a controller step by step: which members are there, and what they hold.

The only reader of messages about loads and copies. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from livescale.control.config import ControllerConfig
from livescale.messages import commands, events
from livescale.policies import ModelPolicy
from livescale.telemetry.history import changes
from livescale.telemetry.history.holdings import Ending, HoldingHistory, HoldingKey, InstanceHistory
from livescale.types import InstanceId, InstanceState, RequestId, WorkerRef

_Joined = events.WorkerJoined | events.AgentJoined
_Report = events.InstanceReport | events.CopyReport
_OfCopy = events.CopyLayerArrived | events.CopyCompleted | events.CopyFailed | events.CopyDropped


class Follower:
    """What is there now. Histories that have ended are not kept: HoldingBegun hands each out."""

    def __init__(self) -> None:
        #: all models that were ever served, as they were published last
        self.policies: dict[str, ModelPolicy] = {}
        #: instances of which a member holds something
        self.instances: dict[InstanceId, InstanceHistory] = {}
        #: requests that were dispatched and have not ended, and where they are
        self.running: dict[RequestId, WorkerRef] = {}
        #: requests that were never dispatched, with their model and the time of arrival
        self._waiting: dict[RequestId, tuple[str, int]] = {}
        #: living members by number, as they joined
        self._members: dict[int, _Joined] = {}
        self._holdings: dict[HoldingKey, HoldingHistory] = {}
        self._has_begun_anew = False
        self._now_ns = 0
        self._changes: list[changes.Change] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.WorkerJoined: self._joined,
            events.AgentJoined: self._joined,
            events.WorkerLost: lambda event: self._lose(event.worker, event.reason),
            commands.StartLoad: self._ordered,
            commands.StartCopy: self._ordered,
            events.LoadStarted: self._first_byte,
            events.LiveStarted: self._live,
            events.LayerArrived: self._arrived,
            events.CopyLayerArrived: self._arrived,
            events.LoadCompleted: self._completed,
            events.CopyCompleted: self._completed,
            events.LoadFailed: self._failed,
            events.CopyFailed: self._failed,
            events.Released: self._released,
            events.CopyDropped: self._released,
            events.InstanceReported: self._reported,
            events.BatchTaken: self._taken,
            commands.Drain: self._draining,
            commands.Resume: self._draining,
            events.ModelAdded: self._model_added,
            commands.ScaleDecided: self._decided,
            events.RequestArrived: self._request_arrived,
            commands.Dispatch: self._dispatched,
            events.RequestEnded: self._request_over,
            events.RequestCancelled: self._request_over,
            commands.FailRequest: self._request_over,
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

    def opening(self) -> tuple[list[_Joined], list[commands.Drain]]:
        """The step with which a further part of a record begins, so that it can be read without
        those before: all living members join with what they hold (but not from whom they get it),
        workers first, and the instances that drain are drained."""
        joined: list[_Joined] = []
        for _, event in sorted(self._members.items()):
            held = self.on(_member_of(event))
            if isinstance(event, events.AgentJoined):
                ranks = [(one.model, one.rank, one.whole_ns is not None) for one in held]
                copies = tuple(events.CopyReport(m, 0, whole, rank) for m, rank, whole in ranks)
                joined.append(events.AgentJoined(event.agent, event.host, copies))
            else:
                report = held[0].as_report() if held else None
                joined.append(events.WorkerJoined(event.worker, event.device, report))
        instances = self.instances.values()
        draining = [i.number for i in instances if i.state is InstanceState.DRAINING]
        return joined, [commands.Drain(number, 0) for number in draining]

    # -- members --------------------------------------------------------------------------------

    def _joined(self, event: _Joined) -> None:
        ref, reports = _member_of(event), _reports(event)
        before = self._members.get(ref.worker)
        if before is not None and _member_of(before) != ref:
            if _member_of(before) > ref:
                return  # late news
            self._lose(_member_of(before), f"{ref} took its place")
        for held in [h for h in self._holdings.values() if h.member.worker == ref.worker]:
            if held.member != ref:
                self._end(held, Ending.LOST, f"{ref} took its place")
            elif held.key not in reports:
                self._end(held, Ending.LOST, "it was not reported again")
        self._members[ref.worker] = event
        self._changes.append(changes.MemberJoined(ref))
        for key, report in reports.items():
            held = self._holdings.get(key) or self._begin(ref, report)
            held.know(self._now_ns, is_known=True)
            is_whole = isinstance(report, events.CopyReport) and report.is_complete
            if isinstance(report, events.InstanceReport) and held.instance is not None:
                is_whole = report.is_loaded
                held.watermark = max(held.watermark, report.watermark)
                held.instance.pairing = report.pairing or held.instance.pairing
                if report.pairing is not None:
                    held.instance.go_live(self._now_ns)
            if is_whole:
                self._whole(held, self._now_ns if held.whole_ns is None else held.whole_ns)

    def _lose(self, ref: WorkerRef, reason: str) -> None:
        lost = self.on(ref)
        for held in lost:
            self._end(held, Ending.LOST, reason)
        event = self._members.get(ref.worker)
        if event is None or _member_of(event) != ref:
            return
        del self._members[ref.worker]
        requests = [request for request, worker in self.running.items() if worker == ref]
        for request in requests:
            del self.running[request]
        self._changes.append(changes.MemberLost(ref, reason, tuple(lost), len(requests)))

    # -- holdings -------------------------------------------------------------------------------

    def _ordered(self, command: commands.StartLoad | commands.StartCopy) -> None:
        if isinstance(command, commands.StartCopy):
            self._begin(command.agent, command)
        else:
            instance = self._begin(command.worker, command).instance
            assert instance is not None
            instance.pairing = command.pairing or instance.pairing

    def _begin(
        self, member: WorkerRef, source: commands.StartLoad | commands.StartCopy | _Report
    ) -> HoldingHistory:
        now_ns, instance = self._now_ns, None
        if isinstance(source, commands.StartLoad | events.InstanceReport):
            number = source.instance
            instance = self.instances.setdefault(
                number, InstanceHistory(number, source.model, [(now_ns, InstanceState.LOADING)])
            )
        policy = self.policies.get(source.model)
        held = HoldingHistory(
            model=source.model,
            member=member,
            rank=source.rank,
            instance=instance,
            plan=source.plan,
            feeds=source.feeds,
            begun_ns=now_ns,
            is_ordered=not isinstance(source, _Report),
            layer_bytes=() if policy is None else policy.spec.layer_bytes,
            known_ns=[now_ns],
        )
        before = self._holdings.get(held.key)
        if before is not None:
            self._end(before, Ending.LOST, "it was ordered again")
        self._holdings[held.key] = held
        if instance is not None:
            instance.holdings.append(held)
        self._changes.append(changes.HoldingBegun(held))
        return held

    def _holding_of(self, event: Any) -> HoldingHistory | None:
        """What a member's news is about; None for late news."""
        if isinstance(event, _OfCopy):
            return self._holdings.get((event.model, event.agent, event.rank))
        return self._holdings.get((event.instance, event.rank))

    def _first_byte(self, event: events.LoadStarted) -> None:
        held = self._holding_of(event)
        if held is not None and held.first_byte_ns is None:
            held.first_byte_ns = self._now_ns

    def _live(self, event: events.LiveStarted) -> None:
        held = self._holding_of(event)
        if held is not None and held.instance is not None:
            held.live_ns = self._now_ns if held.live_ns is None else held.live_ns
            held.instance.go_live(self._now_ns)

    def _arrived(self, event: events.LayerArrived | events.CopyLayerArrived) -> None:
        held = self._holding_of(event)
        if held is None:
            return
        if isinstance(event, events.CopyLayerArrived):
            held.arrive(self._now_ns, event.layer, watermark=0, live_layers=0)
        else:
            held.arrive(self._now_ns, event.layer, event.watermark, event.live_layers)

    def _completed(self, event: events.LoadCompleted | events.CopyCompleted) -> None:
        held = self._holding_of(event)
        if held is not None:
            held.received_bytes = event.received_bytes
            self._whole(held, self._now_ns)

    def _whole(self, held: HoldingHistory, whole_ns: int) -> None:
        held.whole_ns, held.watermark = whole_ns, len(held.layer_bytes)
        if held.instance is not None and held.instance.is_whole:
            held.instance.enter(self._now_ns, InstanceState.SERVING)
        self._changes.append(changes.HoldingWhole(held))

    def _failed(self, event: events.LoadFailed | events.CopyFailed) -> None:
        held = self._holding_of(event)
        if held is not None:
            self._end(held, Ending.FAILED, event.reason)

    def _released(self, event: events.Released | events.CopyDropped) -> None:
        held = self._holding_of(event)
        if held is not None:
            self._end(held, Ending.RELEASED, "")

    def _end(self, held: HoldingHistory, ending: Ending, reason: str) -> None:
        del self._holdings[held.key]
        held.end(self._now_ns, ending, reason)
        instance = held.instance
        if instance is not None and all(h.ended_ns is not None for h in instance.holdings):
            self.instances.pop(instance.number, None)
        self._changes.append(changes.HoldingEnded(held))

    # -- instances ------------------------------------------------------------------------------

    def _reported(self, event: events.InstanceReported) -> None:
        instance = self.instances.get(event.instance)
        if instance is None:
            return
        if event.emitted_tokens and instance.first_token_ns is None:
            instance.first_token_ns = self._now_ns
            self._changes.append(changes.FirstToken(instance))
        instance.emitted_tokens = max(instance.emitted_tokens, event.emitted_tokens)

    def _taken(self, event: events.BatchTaken) -> None:
        for request, _ in event.requests:
            if request in self.running:
                self.running[request] = event.worker
        instance = self.instances.get(event.target)
        if instance is None:
            return
        if instance.first_help_ns is None:
            instance.first_help_ns = self._now_ns
        layers = len(instance.holdings[0].layer_bytes)
        # Requests that were moved when everything was there are no help of a loading one.
        if not layers or event.next_layer < layers:
            instance.taken.append((self._now_ns, event))

    def _draining(self, command: commands.Drain | commands.Resume) -> None:
        instance = self.instances.get(command.instance)
        if instance is not None:
            is_drain = isinstance(command, commands.Drain)
            state = InstanceState.DRAINING if is_drain else InstanceState.SERVING
            instance.enter(self._now_ns, state)
        self._changes.append(command)

    # -- models and requests --------------------------------------------------------------------

    def _model_added(self, event: events.ModelAdded) -> None:
        self.policies[event.policy.spec.name] = event.policy
        self._changes.append(event)

    def _decided(self, command: commands.ScaleDecided) -> None:
        waiting = () if command.from_instances else self._waiting.items()
        first = next(((r, at) for r, (m, at) in waiting if m == command.model), (None, None))
        self._changes.append(changes.Decided(command, *first))

    def _request_arrived(self, event: events.RequestArrived) -> None:
        if event.worker is None:
            self._waiting[event.request] = (event.model, self._now_ns)
        else:
            self.running[event.request] = event.worker

    def _dispatched(self, command: commands.Dispatch) -> None:
        self._waiting.pop(command.request, None)
        self.running[command.request] = command.worker

    def _request_over(
        self, message: events.RequestEnded | events.RequestCancelled | commands.FailRequest
    ) -> None:
        self.running.pop(message.request, None)
        # A request whose attempt has ended elsewhere may still wait.
        if not isinstance(message, events.RequestEnded):
            self._waiting.pop(message.request, None)


# -- helpers, in the order used -------------------------------------------------------------------


def _member_of(joined: _Joined) -> WorkerRef:
    return joined.agent if isinstance(joined, events.AgentJoined) else joined.worker


def _reports(event: _Joined) -> dict[HoldingKey, _Report]:
    if isinstance(event, events.AgentJoined):
        return {(report.model, event.agent, report.rank): report for report in event.copies}
    report = event.report
    return {} if report is None else {(report.instance, report.rank): report}
