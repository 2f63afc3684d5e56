"""Late binding: an instance gets what it computes next, and no more."""

from __future__ import annotations

from livescale.messages.commands import AnyCommand, Dispatch
from livescale.messages.events import InstanceReported, RequestArrived
from livescale.sim.checkers.answers import AnswerChecker
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Knowledge
from livescale.values.bindings import Binding, LateBinding
from livescale.values.types import InstanceId, RequestId, WorkerRef


class AheadChecker:
    """Prompt tokens that instances with all layers hold and have not computed, in one life of a
    controller. What loading instances get is bounded by what would wait longer elsewhere. Who
    leads a team holds what all of its members compute next."""

    def __init__(self, knowledge: Knowledge, answers: AnswerChecker, binding: Binding) -> None:
        self._knowledge = knowledge
        self._answers = answers
        self._tokens_max: int | None = None
        if isinstance(binding, LateBinding):
            self._tokens_max = binding.ahead_tokens_max
        self._prompt_tokens: dict[RequestId, int] = {}
        #: per worker: requests that were dispatched to it and have not started, and their attempts
        self._unstarted: dict[WorkerRef, dict[RequestId, int]] = {}
        self._begun_tokens: dict[InstanceId, int] = {}
        #: (request, attempt) pairs that have their first token
        self._started: dict[tuple[RequestId, int], None] = {}

    def arrived(self, event: RequestArrived) -> None:
        self._prompt_tokens[event.request] = event.prompt_tokens

    def reported(self, report: InstanceReported) -> None:
        if self._tokens_max is not None:
            self._started.update(dict.fromkeys(report.started))
            self._begun_tokens[report.instance] = report.begun_prompt_tokens

    def check(self, command: AnyCommand) -> None:
        """After the answers have this command."""
        if not isinstance(command, Dispatch) or self._tokens_max is None:
            return
        request, worker, running = command.request, command.worker, self._answers.running
        known = self._unstarted.get(worker, {})
        here = {r: n for r, n in known.items() if running.get(r) == worker and r != request}
        here = {r: n for r, n in here.items() if (r, n) not in self._started}
        held = sum(self._prompt_tokens[r] for r in here)
        ahead = max(held - self._begun_tokens.get(command.instance, 0), 0)
        # Where an earlier attempt was, it may come back to: as a later one, which was given there.
        for others in self._unstarted.values():
            others.pop(request, None)
        self._unstarted[worker] = {**here, request: command.attempt}
        model = self._knowledge.requested[request]
        if ahead and self._knowledge.is_copy(model, command.instance):
            tokens = ahead + self._prompt_tokens[request]
            rule = "an instance gets what it computes next, and no more"
            most = self._tokens_max * self._members(model, command.instance)
            require(tokens <= most, rule, command, ahead, tokens)

    def _members(self, model: str, instance: InstanceId) -> int:
        """Of the team that the instance leads: it may have all layers before the others do. Or of
        its pipeline."""
        duty = self._knowledge.ranks(model, instance)[0].order.duty
        for pipeline in () if duty is None else duty.pipelines:
            if pipeline.leader.instance == instance:
                return len(pipeline.members)
        team = None if duty is None else duty.team
        return len(team.members) if team is not None and team.leader.instance == instance else 1
