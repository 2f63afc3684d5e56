"""The controller never drops a model's last copy, nor one that is being read.

A copy is an instance whose ranks have everything, or every rank in the memory of one host. Faults
may take the last copy; a command may not. What the controller cannot know (that the other copy has
just died) is no fault of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.messages.commands import AnyCommand, DropCopy, Release
from livescale.messages.events import AnyEvent, ModelAdded, ModelRemoved
from livescale.policies import ModelPolicy
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.types import WorkerRef


class LastCopyChecker:
    """`keeps_last` False is for placements that rely on storage alone."""

    def __init__(
        self, knowledge: Knowledge, models: Sequence[ModelPolicy], keeps_last: bool
    ) -> None:
        self._knowledge = knowledge
        self._keeps_last = keeps_last
        #: models that must keep a copy in the cluster's memory
        self._kept: dict[str, None] = {}
        if keeps_last:
            self._kept = {policy.spec.name: None for policy in models}

    def absorb(self, event: AnyEvent) -> None:
        if isinstance(event, ModelAdded) and self._keeps_last:
            self._kept[event.policy.spec.name] = None
        elif isinstance(event, ModelRemoved):
            self._kept.pop(event.model, None)

    def check(self, command: AnyCommand) -> None:
        """Before the knowledge has this command."""
        knowledge = self._knowledge
        if isinstance(command, Release):
            # A part of an instance is no copy: nobody can use what is left of it.
            if knowledge.is_complete(command.instance):
                model = knowledge.model_of[command.instance]
                others = [i for i in knowledge.holders(model) if i != command.instance]
                is_kept = bool(others) or knowledge.has_whole_host_copy(model)
                self._check_goes(model, command.worker, is_kept, command)
        elif isinstance(command, DropCopy) and knowledge.is_whole(command.model, command.agent):
            model = command.model
            agents = [a for name, a, _ in knowledge.whole if name == model and a != command.agent]
            is_kept = any(knowledge.is_whole(model, agent) for agent in agents)
            is_kept = is_kept or bool(knowledge.holders(model))
            self._check_goes(model, command.agent, is_kept, command)

    # -- helpers --------------------------------------------------------------------------------

    def _check_goes(self, model: str, holder: WorkerRef, is_kept: bool, command: object) -> None:
        """What members that come late still have of a model that is gone may all go, in any
        order."""
        if model not in self._knowledge.specs:
            return
        require(is_kept or model not in self._kept, "the last copy is kept", command)
        readers = self._knowledge.readers(model, holder)
        require(not readers, "a copy that is read from is kept", command, readers)
