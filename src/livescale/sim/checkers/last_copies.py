"""The controller never drops a model's last copy, nor one that is being read.

A copy is an instance whose ranks have everything, or every rank in the memory of one host. Faults
may take the last copy; a command may not. What the controller cannot know (that the other copy has
just died) is no fault of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.messages.commands import AnyCommand, DropHolding
from livescale.messages.events import AnyEvent, ModelAdded, ModelRemoved
from livescale.policies import ModelPolicy
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge


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
        if not isinstance(command, DropHolding):
            return
        knowledge = self._knowledge
        held = knowledge.holdings[command.holding]
        model, ranks = held.order.model, knowledge.ranks(held.order.model, held.copy).values()
        # A part of a copy is none: nobody can use what is left of it. What members that come late
        # still have of a model that is gone may all go, in any order.
        is_one = held.instance is not None or all(rank.is_whole for rank in ranks)
        if not is_one or not knowledge.is_placed(model, held.copy) or model not in knowledge.specs:
            return
        is_kept = any(copy != held.copy for copy in knowledge.copies(model))
        require(is_kept or model not in self._kept, "the last copy is kept", command)
        readers = knowledge.readers(model, held.member)
        require(not readers, "a copy that is read from is kept", command, readers)
