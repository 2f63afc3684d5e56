"""What must hold of changes of duties: where instances drain to, decode, and what they are in.

As in `commands.py` the rules are stated from events and commands alone.
"""

from __future__ import annotations

import msgspec

from livescale.messages import commands
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.routes import Partner
from livescale.values.stages import stage_name
from livescale.values.types import Role


class DutyChecker:
    """Of one life of a controller, by what that knows before each command."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    def check(self, command: commands.ChangeDuty) -> None:
        """Only draining instances pass on what they have, to others of their model that are whole
        and stay. Loading ones may lose their partners. Prefill instances pass on what decodes."""
        knowledge = self._knowledge
        held = knowledge.holdings.get(command.holding)
        require(held is not None and not held.is_leaving, "who has a duty is there", command)
        assert held is not None
        duty, takers = held.order.duty, command.duty.drains_to
        assert duty is not None
        has_role = (command.duty.role, command.duty.decodes_at) != (duty.role, duty.decodes_at)
        if has_role:
            self._check_role(command)
            duty = msgspec.structs.replace(
                duty, role=command.duty.role, decodes_at=command.duty.decodes_at
            )
        if command.duty.pipelines != duty.pipelines:
            self._check_pipelines(command)
            is_same = (
                msgspec.structs.replace(duty, pipelines=command.duty.pipelines) == command.duty
            )
            require(is_same, "nothing else of a duty changes with its pipelines", command, duty)
            return
        if command.duty.team != duty.team:
            self._check_team(command, held.order.model)
            duty = msgspec.structs.replace(duty, team=command.duty.team)
            if command.duty.team is not None:
                duty = msgspec.structs.replace(duty, gives_to=(), live_order=None)
            require(command.duty == duty, "who joins a team works for that alone", command, duty)
            return
        if not knowledge.is_loaded(held.order.model, held.copy):
            alone = msgspec.structs.replace(duty, gives_to=())
            is_same = has_role and command.duty == duty
            is_alone = command.duty == alone != duty
            require(is_same or is_alone, "who loads only loses partners", command, duty)
            return
        is_same = msgspec.structs.replace(duty, drains_to=takers) == command.duty
        require(is_same, "a duty changes only in where it drains to", command, duty)
        is_draining = duty.instance in knowledge.draining
        require(is_draining or not takers, "instances that serve keep their requests", command)
        for taker in takers:
            self._check_taker(command, held.order.model, taker.partner)

    def _check_team(self, command: commands.ChangeDuty, model: str) -> None:
        """Members of a team load the same model, and are in no other one."""
        team = command.duty.team
        if team is None:
            return
        members = [member.partner.instance for member in team.members]
        require(command.duty.instance in members, "a team is told to its members", command)
        for member in team.members:
            ranks = self._knowledge.ranks(model, member.partner.instance)
            require(bool(ranks), "members of a team are there", command, member)
            its = ranks[0].order.duty
            other = its.team if its is not None else None
            require(other in (None, team), "an instance is in one team", command, other)

    def _check_pipelines(self, command: commands.ChangeDuty) -> None:
        """New members of pipelines are whole instances of the stages of one model, and stay."""
        knowledge, own = self._knowledge, command.duty.instance
        before = knowledge.holdings[command.holding].order
        known = before.duty.pipelines if before.duty is not None else ()
        old = {member for pipeline in known for member in pipeline.members}
        stage = knowledge.specs[before.model].stage
        for pipeline in command.duty.pipelines:
            members = [member.partner.instance for member in pipeline.members]
            require(own in members, "a pipeline is told to its members", command)
            is_all = stage is not None and len(pipeline.stages) == stage.count
            require(is_all, "a pipeline has members of each stage", command, stage)
            for number, of_stage in enumerate(pipeline.stages):
                model = stage_name(stage.model if stage is not None else "", number)
                for member in of_stage:
                    stays = member.partner.instance in knowledge.holders(model)
                    stays = stays and member.partner.instance not in knowledge.draining
                    rule = "new members of a pipeline are whole and stay"
                    require(stays or member in old, rule, command, member)

    def _check_role(self, command: commands.ChangeDuty) -> None:
        """Prefill instances give what decodes to decode instances."""
        knowledge, duty = self._knowledge, command.duty
        is_prefill = duty.role is Role.PREFILL
        require(is_prefill or not duty.decodes_at, "only prefill instances give", command)
        model = knowledge.holdings[command.holding].order.model
        for partner in duty.decodes_at:
            self._check_taker(command, model, partner)
            its = knowledge.ranks(model, partner.instance)[0].order.duty
            takes = its is not None and its.role is Role.DECODE
            require(takes, "decode instances take what decodes", command, its)

    def _check_taker(self, command: commands.ChangeDuty, model: str, taker: Partner) -> None:
        knowledge = self._knowledge
        is_apart = taker.instance != command.duty.instance
        is_apart = is_apart and taker.instance not in knowledge.draining
        is_whole = taker.instance in knowledge.holders(model) and is_apart
        require(is_whole, "takers are whole and stay", command, taker)
        first = knowledge.ranks(model, taker.instance)[0].member
        require(taker.worker == first, "rank 0 takes requests", command, taker)
