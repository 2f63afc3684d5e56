"""What must hold of a controller's commands, in every simulated world.

The rules are stated from events and commands alone, so that they share no code with what they
check. A broken rule raises at once; nothing is repaired. Rules that take more than a few lines
have files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.chunks import Feed, senders
from livescale.control.config import ControllerConfig
from livescale.messages import commands, events
from livescale.placements import AllCopies, SpreadCopies
from livescale.sim.checkers.answers import AnswerChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.sim.checkers.last_copies import LastCopyChecker
from livescale.sim.checkers.turns import TurnChecker
from livescale.types import WorkerRef


class CommandChecker:
    """Rules about one life of a controller, which begins with these models."""

    def __init__(self, config: ControllerConfig, failures: FailureChecker) -> None:
        """`failures` are those of all lives of this controller."""
        self._knowledge = Knowledge(config.models)
        self._answers = AnswerChecker(self._knowledge, failures)
        keeps_last = isinstance(config.placement, SpreadCopies | AllCopies)
        self._copies = LastCopyChecker(self._knowledge, config.models, keeps_last)
        self._failures = failures
        self._turns = TurnChecker(self._knowledge, self._answers, config.sequences_max)
        failures.begin_life(self._knowledge)

    def observe(
        self,
        now_ns: int,
        received: Sequence[events.AnyEvent],
        ordered: Sequence[commands.AnyCommand],
    ) -> None:
        """Check one step."""
        for event in received:
            self._answers.absorb(event)
            self._copies.absorb(event)
            if isinstance(event, events.InstanceReported):
                is_within = 0 <= event.kv_blocks_used <= event.kv_blocks
                require(is_within, "KV blocks are not overdrawn", event)
            self._failures.absorb(event)
            self._knowledge.absorb(event)
            self._turns.absorb(event)
        for command in ordered:
            self._check(command)
            self._answers.check(command)
            self._turns.check(command)
            self._copies.check(command)
            self._failures.check(now_ns, command)
            self._knowledge.ordered(command)
            if isinstance(command, commands.StartHolding):
                self._check_memory(command)

    def all_answered(self) -> None:
        self._answers.all_answered()
        loads = self._knowledge.open()
        require(not loads, "every load ends", loads)

    def at_rest(
        self,
        members: Mapping[WorkerRef, Sequence[events.HoldingReport]],
        least: Mapping[str, int],
    ) -> None:
        """Nothing happens any more: members hold what the controller knows, and every model has
        its `least` number of instances."""
        self.all_answered()
        knowledge = self._knowledge
        for member, reports in members.items():
            known = sorted(held.order.holding for held in knowledge.on(member))
            reported = sorted(report.order.holding for report in reports)
            rule = "a member holds what is known of it"
            require(known == reported, rule, member, known, reported)
        for model, instances_min in least.items():
            holders = knowledge.holders(model)
            rule = "every model comes to its least number of instances"
            require(len(holders) >= instances_min, rule, model, holders, instances_min)

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
        elif isinstance(command, commands.DropHolding):
            is_there = command.holding in knowledge.holdings
            require(is_there, "only what is there is dropped", command)
        elif isinstance(command, commands.Dispatch):
            model = self._failures.model_of(command.request)
            may_serve = knowledge.may_serve(model, command.instance)
            require(may_serve, "complete models serve, and live instances", command)
            is_draining = command.instance in knowledge.draining
            require(not is_draining, "draining instances get no requests", command)
            first = knowledge.ranks(model, command.instance)[0].member
            require(command.worker == first, "rank 0 gets the requests", command)
        elif isinstance(command, commands.ModelGone):
            requests = self._failures.requests_of(command.model)
            left = [request for request in requests if not self._answers.is_over(request)]
            require(not left, "a model with requests stays", command, left)
        elif isinstance(command, commands.Drain):
            model = knowledge.model_of(command.instance)
            serving = [i for i in knowledge.holders(model) if i not in knowledge.draining]
            others = [instance for instance in serving if instance != command.instance]
            loading = knowledge.loading(model)
            rule = "while others load, the last instance that serves stays"
            require(bool(others) or not loading, rule, command, loading)

    def _check_start(self, command: commands.StartHolding) -> None:
        """A worker has a duty, an agent has none."""
        member, duty = command.holding.member, command.duty
        require(member.is_agent == (duty is None), "workers serve, agents hold", command)
        if duty is not None:
            held = self._knowledge.on(member)
            require(not held, "a worker is in one instance", command, held)
            ranks = self._knowledge.tp_size(command.model)
            is_in_place = len(duty.workers) == ranks and duty.workers[command.rank] == member
            require(is_in_place, "workers stand in the order of their ranks", command)

    def _check_memory(self, command: commands.StartHolding) -> None:
        """After the knowledge has this command. A member carries out its orders one after the
        other: what it was told to drop makes room, what it holds of a model that is gone does
        not."""
        knowledge, member = self._knowledge, command.holding.member
        staying = [held.order.model for held in knowledge.on(member) if not held.is_leaving]
        # Of models that were gone before this life of the controller, nobody knows the size.
        held_bytes = sum(knowledge.sizes.get(model, 0) for model in staying)
        is_within = held_bytes <= knowledge.memory_bytes[member]
        require(is_within, "holdings fit their member's memory", command, held_bytes)

    def _check_feeds(self, receiver: WorkerRef, feeds: tuple[Feed, ...]) -> None:
        for upstream in senders(feeds):
            sender = upstream.worker
            require(sender != receiver, "nobody feeds itself", receiver)
            require(self._knowledge.is_alive(sender), "senders are alive", receiver, sender)
