"""What must hold of a controller's commands, in every simulated world.

The rules are stated from events and commands alone, so that they share no code with what they
check. A broken rule raises at once; nothing is repaired. Rules that take more than a few lines
have files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.chunks import Feed, senders
from livescale.control.config import ControllerConfig
from livescale.messages.commands import (
    AmendLoad,
    AnyCommand,
    Dispatch,
    Drain,
    ModelGone,
    StartCopy,
    StartLoad,
)
from livescale.messages.events import AnyEvent, CopyReport, InstanceReport
from livescale.placements import AllCopies, SpreadCopies
from livescale.sim.checkers.answers import AnswerChecker
from livescale.sim.checkers.failures import FailureChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.sim.checkers.last_copies import LastCopyChecker
from livescale.sim.checkers.memory import MemoryChecker
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
        self._memory = MemoryChecker(self._knowledge)
        self._failures = failures
        self._turns = TurnChecker(self._knowledge, self._answers, config.sequences_max)
        failures.begin_life(self._knowledge)

    def observe(
        self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> None:
        """Check one step."""
        for event in events:
            self._answers.absorb(event)
            self._copies.absorb(event)
            self._memory.absorb(event)
            self._failures.absorb(event)
            self._knowledge.absorb(event)
            self._turns.absorb(event)
        for command in commands:
            self._check(command)
            self._answers.check(command)
            self._turns.check(command)
            self._copies.check(command)
            self._failures.check(now_ns, command)
            self._knowledge.ordered(command)
            self._memory.check(command)

    def all_answered(self) -> None:
        self._answers.all_answered()
        loads = self._knowledge.feeds
        require(not loads, "every load ends", loads)

    def at_rest(
        self,
        workers: Mapping[WorkerRef, InstanceReport | None],
        agents: Mapping[WorkerRef, Sequence[CopyReport]],
        least: Mapping[str, int],
    ) -> None:
        """Nothing happens any more: members hold what the controller knows, and every model has
        its `least` number of instances."""
        self.all_answered()
        knowledge = self._knowledge
        for worker, report in workers.items():
            known = list(knowledge.instances_on(worker))
            held = [report.instance] if report is not None else []
            require(known == held, "a worker holds what is known of it", worker, known, held)
        for agent, copies in agents.items():
            plans = sorted(knowledge.plans_on(agent))
            reported = sorted(report.plan for report in copies)
            require(plans == reported, "an agent holds what is known of it", agent, plans, reported)
        for model, instances_min in least.items():
            holders = knowledge.holders(model)
            rule = "every model comes to its least number of instances"
            require(len(holders) >= instances_min, rule, model, holders, instances_min)

    # -- helpers --------------------------------------------------------------------------------

    def _check(self, command: AnyCommand) -> None:
        knowledge = self._knowledge
        if isinstance(command, StartLoad):
            held = [i for i in knowledge.instances_on(command.worker) if i != command.instance]
            require(not held, "a worker is in one instance", command, held)
            self._check_feeds(command.worker, command.feeds)
        elif isinstance(command, StartCopy):
            self._check_feeds(command.agent, command.feeds)
        elif isinstance(command, AmendLoad):
            is_open = (command.plan, command.receiver) in knowledge.feeds
            require(is_open, "only open loads are amended", command)
            self._check_feeds(command.receiver, command.feeds)
        elif isinstance(command, Dispatch):
            may_serve = knowledge.may_serve(command.instance)
            require(may_serve, "complete models serve, and live instances", command)
            is_draining = command.instance in knowledge.draining
            require(not is_draining, "draining instances get no requests", command)
            first = knowledge.ranks[command.instance][0]
            require(command.worker == first, "rank 0 gets the requests", command)
        elif isinstance(command, ModelGone):
            requests = self._failures.requests_of(command.model)
            left = [request for request in requests if not self._answers.is_over(request)]
            require(not left, "a model with requests stays", command, left)
        elif isinstance(command, Drain):
            model = knowledge.model_of[command.instance]
            others = [i for i in knowledge.serving(model) if i != command.instance]
            loading = knowledge.loading(model)
            rule = "while others load, the last instance that serves stays"
            require(bool(others) or not loading, rule, command, loading)

    def _check_feeds(self, receiver: WorkerRef, feeds: tuple[Feed, ...]) -> None:
        for upstream in senders(feeds):
            sender = upstream.worker
            require(sender != receiver, "nobody feeds itself", receiver)
            require(self._knowledge.is_alive(sender), "senders are alive", receiver, sender)
