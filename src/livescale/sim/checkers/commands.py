"""What must hold of a controller's commands, in every simulated world.

The rules are stated from events and commands alone, so that they share no code with what they
check. A broken rule raises at once; nothing is repaired. Rules that take more than a few lines
have files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.control.state.config import ControllerConfig
from livescale.messages import commands, events
from livescale.sim.checkers.ahead import AheadChecker
from livescale.sim.checkers.answers import AnswerChecker
from livescale.sim.checkers.cores import CoreChecker
from livescale.sim.checkers.departures import DepartureChecker
from livescale.sim.checkers.duties import DutyChecker
from livescale.sim.checkers.failures import FailureChecker, KnownFailures
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.key_copies import check_key_copy
from livescale.sim.checkers.knowledge import PROGRESS, Held, Knowledge
from livescale.sim.checkers.limits import LimitChecker
from livescale.sim.checkers.stage_leasts import StageLeastChecker
from livescale.sim.checkers.stage_reasons import check_stage_reasons
from livescale.sim.checkers.stage_totals import StageTotalChecker
from livescale.sim.checkers.turns import TurnChecker
from livescale.values.chunks import Feed, senders
from livescale.values.copy_strategies import keeps_last
from livescale.values.types import HoldingId, WorkerRef


class CommandChecker:
    """Rules about one life of a controller, which begins with these models."""

    def __init__(self, config: ControllerConfig, failures: FailureChecker) -> None:
        """`failures` are those of all lives of this controller."""
        self._knowledge = Knowledge(config.models)
        self._answers = AnswerChecker(self._knowledge, failures, config.avoid_ns)
        self._placement = config.placement
        self._failures = failures
        self._turns = TurnChecker(self._knowledge, self._answers, failures, config.sequences_max)
        self._ahead = AheadChecker(self._knowledge, self._answers, config.binding)
        self._failed = KnownFailures(self._knowledge)
        self.departures = DepartureChecker(self._knowledge)
        self._duties = DutyChecker(self._knowledge)
        self._totals = StageTotalChecker(self._knowledge, config.scaling)
        self._leasts = StageLeastChecker(self._knowledge, self.departures, config.wall_ns)
        self._cores = CoreChecker(self._knowledge, config.scaling)
        self._limits = LimitChecker(self._knowledge, config)

    def observe(
        self,
        now_ns: int,
        received: Sequence[events.AnyEvent],
        ordered: Sequence[commands.AnyCommand],
    ) -> None:
        """Check one step."""
        self._limits.check(now_ns, received)
        for event in received:
            if isinstance(event, events.InstanceReported):
                is_within = 0 <= event.kv_blocks_used <= event.kv_blocks
                require(is_within, "KV blocks are not overdrawn", event)
                self._ahead.reported(event)
            if isinstance(event, PROGRESS):
                continue
            self._answers.absorb(event, now_ns)
            self._failures.absorb(self._failed, now_ns, event)
            self.departures.absorb(event)
            self._cores.absorb(event)
            self._knowledge.absorb(event)
            self._turns.absorb(event)
            if isinstance(event, events.RequestArrived):
                self._ahead.arrived(event)
        for command in ordered:
            self._check(command)
            self._answers.check(command)
            self._turns.check(command)
            self._ahead.check(command)
            self._failures.check(self._failed, now_ns, command)
            self.departures.check(command)
            self._cores.check(command)
            self._leasts.check(now_ns, command)
            self._knowledge.ordered(command)
            if isinstance(command, commands.StartHolding):
                self._check_memory(command)
                check_key_copy(self._knowledge, self._placement, command)
        self._totals.check(ordered)
        check_stage_reasons(self._knowledge, ordered)
        for command in ordered:
            if isinstance(command, commands.Resume):
                self._check_resumed(command)

    def all_answered(self) -> None:
        self._answers.all_answered()
        self._cores.all_answered()
        loads = self._knowledge.open()
        require(not loads, "every load ends", loads)

    def at_rest(
        self,
        now_ns: int,
        members: Mapping[WorkerRef, Sequence[events.HoldingReport]],
        cores: Mapping[WorkerRef, int],
    ) -> None:
        """Nothing happens any more: members hold what the controller knows, workers have these
        cores, and every model is within its limits."""
        self.all_answered()
        self._cores.at_rest(cores)
        knowledge = self._knowledge
        for member, reports in members.items():
            known = sorted(held.order.holding for held in knowledge.on(member))
            reported = sorted(report.order.holding for report in reports)
            rule = "a member holds what is known of it"
            require(known == reported, rule, member, known, reported)
        self._limits.at_rest(now_ns)

    # -- helpers --------------------------------------------------------------------------------

    def _check(self, command: commands.AnyCommand) -> None:
        knowledge = self._knowledge
        if isinstance(command, commands.StartHolding):
            self._check_start(command)
            self._check_feeds(command.holding.member, command.feeds)
        elif isinstance(command, commands.AmendHolding):
            held = knowledge.holdings.get(command.holding)
            is_open = held is not None and not held.is_whole
            require(is_open, "only open loads are amended", command)
            self._check_feeds(command.holding.member, command.feeds)
        elif isinstance(command, commands.ReleaseHolding):
            self._check_release(command)
        elif isinstance(command, commands.ChangeDuty):
            self._duties.check(command)
        elif isinstance(command, commands.DropHolding):
            is_there = command.holding in knowledge.holdings
            require(is_there, "only what is there is dropped", command)
            self._check_copy(command)
        elif isinstance(command, commands.Dispatch):
            model = knowledge.requested[command.request]
            may_serve = knowledge.may_serve(model, command.instance)
            require(may_serve, "complete models serve, and live instances", command)
            is_draining = command.instance in knowledge.draining
            require(not is_draining, "draining instances get no requests", command)
            first = knowledge.ranks(model, command.instance)[0].member
            require(command.worker == first, "rank 0 gets the requests", command)
        elif isinstance(command, commands.ModelGone):
            requests = [r for r, model in knowledge.requested.items() if model == command.model]
            left = [request for request in requests if request not in self._answers.over]
            require(not left, "a model with requests stays", command, left)
        elif isinstance(command, commands.Drain):
            model = knowledge.model_of(command.instance)
            serving = [i for i in knowledge.holders(model) if i not in knowledge.draining]
            others = [instance for instance in serving if instance != command.instance]
            loading = knowledge.loading(model)
            is_leaving = self.departures.is_leaving(model, command.instance)
            rule = "while others load, the last instance that serves stays, if its host does"
            require(bool(others) or not loading or is_leaving, rule, command, loading)

    def _check_start(self, command: commands.StartHolding) -> None:
        """A worker has a duty, an agent has none."""
        member, duty = command.holding.member, command.duty
        require(member.is_agent == (duty is None), "workers serve, agents hold", command)
        if duty is not None:
            held = [h for h in self._knowledge.on(member) if not h.is_spare]
            require(not held, "a worker is in one instance", command, held)
            if command.spare is not None:
                spare = self._knowledge.holdings.get(HoldingId(command.spare, member))
                require(self._is_whole_of(command, spare), "a warm spare is used", command, spare)
            ranks = self._knowledge.tp_size(command.model)
            is_in_place = len(duty.workers) == ranks and duty.workers[command.rank] == member
            require(is_in_place, "workers stand in the order of their ranks", command)

    @staticmethod
    def _is_whole_of(command: commands.StartHolding, held: Held | None) -> bool:
        """It is a warm spare that stays, of the bytes that the order wants, in their place."""
        if held is None or not held.is_spare or held.is_leaving:
            return False
        there, wanted = (
            (order.model, order.rank, order.span, order.offset_bytes)
            for order in (held.order, command)
        )
        return there == wanted

    def _check_release(self, command: commands.ReleaseHolding) -> None:
        """What drains becomes a warm spare; so do the other ranks of one that an earlier life of
        the controller began to release."""
        knowledge = self._knowledge
        held = knowledge.holdings.get(command.holding)
        require(held is not None, "only what is there is released", command)
        assert held is not None
        is_copy = knowledge.is_copy(held.order.model, held.copy)
        require(is_copy, "only whole copies become spares", command, held)
        ranks = knowledge.ranks(held.order.model, held.copy).values()
        is_over = any(rank.is_spare for rank in ranks)
        require(is_over or held.instance in knowledge.draining, "only what drains ends", command)

    def _check_resumed(self, command: commands.Resume) -> None:
        """After the step in which the instance is wanted again, and not given up for another model
        in the same step."""
        if command.instance in self._knowledge.draining:
            return
        model = self._knowledge.model_of(command.instance)
        held = self._knowledge.ranks(model, command.instance)[0]
        duty = held.order.duty
        is_kept = duty is not None and not duty.drains_to
        require(is_kept, "instances that serve keep their requests", command, duty)

    def _check_copy(self, command: commands.DropHolding) -> None:
        """A model's last copy is never dropped, nor one that is being read. Faults may take the
        last copy; what the controller cannot know (that the other one has just died) is no fault of
        its own."""
        knowledge = self._knowledge
        held = knowledge.holdings[command.holding]
        model, ranks = held.order.model, knowledge.ranks(held.order.model, held.copy).values()
        # A part of a copy is none: what is left of it has no use. What members that come late
        # still have of a model that is gone may all go, in any order.
        is_one = held.instance is not None or all(rank.is_whole for rank in ranks)
        if not is_one or not knowledge.is_placed(model, held.copy) or model not in knowledge.specs:
            return
        others = [copy for copy in knowledge.copies(model) if copy != held.copy]
        is_needed = keeps_last(self._placement) and model not in knowledge.withdrawn
        require(bool(others) or not is_needed, "the last copy is kept", command)
        readers = knowledge.readers(model, held.member)
        require(not readers, "a copy that is read from is kept", command, readers)

    def _check_memory(self, command: commands.StartHolding) -> None:
        """After the knowledge has this command. A member carries out its orders one after the
        other: what it was ordered to drop makes room, what it holds of a model that is gone does
        not."""
        knowledge, member = self._knowledge, command.holding.member
        staying = [held.order for held in knowledge.on(member) if not held.is_leaving]
        # Of models that were gone before this life of the controller, the size is not known.
        sizes = [knowledge.sizes.get(order.model, 0) for order in staying]
        is_within = sum(sizes) <= knowledge.memory_bytes[member]
        require(is_within, "holdings fit their member's memory", command, staying)
        if member.is_agent:
            return  # it finds places itself
        places = sorted(zip((order.offset_bytes for order in staying), sizes, strict=True))
        ends = [offset + size for offset, size in places]
        starts = [offset for offset, _ in places[1:]]
        is_apart = all(end <= start for end, start in zip(ends, starts, strict=False))
        is_apart = is_apart and max(ends) <= knowledge.memory_bytes[member]
        require(is_apart, "holdings lie apart in their worker's memory", command, staying)

    def _check_feeds(self, receiver: WorkerRef, feeds: tuple[Feed, ...]) -> None:
        for upstream in senders(feeds):
            sender = upstream.worker
            require(sender != receiver, "no member feeds itself", receiver)
            require(self._knowledge.is_alive(sender), "senders are alive", receiver, sender)
