"""Members that leave: nothing new comes to them, and nothing is lost with those that are let go."""

from __future__ import annotations

from collections.abc import Collection

from livescale.messages import commands, events
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import CopyKey, Held, Knowledge
from livescale.values.types import WorkerRef


class DepartureChecker:
    """Of one life of the controller."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        #: members that find the models' files
        self._readers: dict[WorkerRef, None] = {}

    def absorb(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.WorkerJoined):
            if event.device.reads_files:
                self._readers[event.worker] = None
        elif isinstance(event, events.AgentJoined) and event.host.reads_files:
            self._readers[event.agent] = None

    def check(self, command: commands.AnyCommand) -> None:
        """Before the knowledge has this command."""
        rule = "nothing new comes to those who leave"
        if isinstance(command, commands.StartHolding):
            require(command.holding.member not in self._knowledge.leaving, rule, command)
        elif isinstance(command, commands.ChangeDuty):
            # Takers of before may stand in a duty that changes for another reason.
            before = self._knowledge.holdings[command.holding].order.duty
            known = before.drains_to if before is not None else ()
            takers = [t.partner.worker for t in command.duty.drains_to if t not in known]
            require(not any(taker in self._knowledge.leaving for taker in takers), rule, command)
        elif isinstance(command, commands.Resume):
            model = self._knowledge.model_of(command.instance)
            require(not self.is_leaving(model, command.instance), rule, command)

    def is_leaving(self, model: str, copy: CopyKey) -> bool:
        """A member that has a part of the copy wants to go."""
        ranks = self._knowledge.ranks(model, copy).values()
        return any(rank.member in self._knowledge.leaving for rank in ranks)

    def lets_go(self, members: Collection[WorkerRef]) -> None:
        """After the knowledge has the step in which these members were told that they may go."""
        knowledge = self._knowledge
        for member in members:
            require(member in knowledge.leaving, "only who wants to leave is let go", member)
            for held in knowledge.on(member):
                if held.is_leaving:
                    continue
                require(held.instance is None, "instances end before their host goes", held)
                model = held.order.model
                if model in knowledge.specs and model not in knowledge.withdrawn:
                    self._check_copy(held)

    # -- helpers --------------------------------------------------------------------------------

    def _check_copy(self, held: Held) -> None:
        """Another whole copy stays, or a member that reads the model's files."""
        knowledge, model = self._knowledge, held.order.model
        if not knowledge.is_loaded(model, held.copy):
            return
        copies = [copy for copy in knowledge.copies(model) if knowledge.is_loaded(model, copy)]
        stays = [copy for copy in copies if not self.is_leaving(model, copy)]
        readers = [
            reader
            for reader in self._readers
            if knowledge.is_alive(reader) and reader not in knowledge.leaving
        ]
        require(bool(stays or readers), "the last copy stays when a host goes", held)
