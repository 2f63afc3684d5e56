"""Controllers fail requests only when nothing else is left.

A model is given up after failed loads, which fail only while its files are wrong or members refuse,
or after two workers that died while they loaded it, and whose hosts did not leave, and while
nothing of it is there from which no load has failed; a single request after as many lost attempts
as it may have, or when its model is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from livescale.control.state.config import ControllerConfig
from livescale.messages import commands, events
from livescale.sim.checkers.invariants import require
from livescale.sim.checkers.knowledge import Held, Knowledge
from livescale.values.stages import stage_name
from livescale.values.types import InstanceId, RequestId, WorkerRef

#: after so many workers that died while they loaded, one after the other, the model is given up
DEATHS_MAX = 2


@dataclass(slots=True)
class Row:
    """Loads of a model that failed in a row, those of them beside a copy in memory, and workers
    that died while they loaded it."""

    loads: int = 0
    beside_copy: int = 0
    deaths: int = 0
    #: when the newest one failed that a pause follows
    paused_ns: int | None = None


@dataclass(slots=True)
class KnownFailures:
    """What one life of the controller, which begins knowing nothing, has seen of failed loads."""

    knowledge: Knowledge
    #: per model, what failed since a load ended well, and the place of the last failure
    failures: dict[str, Row] = field(default_factory=dict)
    last_failure: dict[str, int] = field(default_factory=dict)


class FailureChecker:
    """All lives of the controller of one world."""

    def __init__(
        self, config: ControllerConfig, may_loads_fail: Callable[[str, int], bool]
    ) -> None:
        """`may_loads_fail(model, since_ns)`: at some time since then there was a reason."""
        self._config = config
        self._may_loads_fail = may_loads_fail
        #: attempts of each request that were lost with their worker
        self._lost: dict[RequestId, dict[int, None]] = {}
        #: requests that a controller has failed when nothing else was left
        self.failed: dict[RequestId, None] = {}
        self._gone: dict[str, None] = {}
        #: when the loads of each instance were ordered: virtual time, and place among all news
        self._ordered: dict[InstanceId, tuple[int, int]] = {}
        self._dropped: dict[InstanceId, None] = {}
        self._news = 0

    # -- attempts -------------------------------------------------------------------------------

    def lost(self, request: RequestId, attempt: int) -> None:
        """The attempt was lost with its worker."""
        self._lost.setdefault(request, {})[attempt] = None

    def found(self, request: RequestId, attempt: int) -> None:
        """Another worker has taken the attempt over before its worker was lost."""
        self._lost.get(request, {}).pop(attempt, None)

    def may_be_alone(self, request: RequestId) -> bool:
        """It may have one attempt left, for which it waits until it has no company."""
        lost = len(self._lost.get(request, ()))
        return lost > 0 and lost >= self._config.request_attempts_max - 1

    # -- events and commands --------------------------------------------------------------------

    def absorb(self, life: KnownFailures, now_ns: int, event: events.AnyEvent) -> None:
        """Before the knowledge has this event."""
        self._news += 1
        for member in life.knowledge.lost_by(event):
            self._member_lost(life, now_ns, member)
        if isinstance(event, events.HoldingCompleted | events.HoldingFailed):
            held = life.knowledge.holdings.get(event.holding)
            if held is None or held.is_leaving:
                return
            if isinstance(event, events.HoldingCompleted):
                self._completed(life, held)
            elif held.instance is not None:
                self._load_failed(life, now_ns, held, held.instance)

    def check(self, life: KnownFailures, now_ns: int, command: commands.AnyCommand) -> None:
        """Before the knowledge has this command, and those behind it."""
        self._news += 1
        if isinstance(command, commands.StartHolding) and command.duty is not None:
            self._ordered.setdefault(command.duty.instance, (now_ns, self._news))
            self._check_pause(life, now_ns, command)
        elif isinstance(command, commands.DropHolding):
            instance = life.knowledge.holdings[command.holding].instance
            if instance is not None:
                self._dropped[instance] = None
        elif isinstance(command, commands.ModelGone):
            self._gone[command.model] = None
        elif isinstance(command, commands.FailRequest):
            if command.retry_after_ns is not None:
                self._check_given_up(life, command)
            elif not self._is_gone(life.knowledge.requested[command.request]):
                lost = list(self._lost.get(command.request, ()))
                is_due = len(lost) >= self._config.request_attempts_max
                require(is_due, "a request fails after its last attempt is lost", command, lost)
            self.failed[command.request] = None

    # -- helpers --------------------------------------------------------------------------------

    def _is_gone(self, model: str) -> bool:
        return model in self._gone or stage_name(model, 0) in self._gone

    def _completed(self, life: KnownFailures, held: Held) -> None:
        """A copy of which the last rank has come can be loaded from."""
        model = held.order.model
        ranks = life.knowledge.ranks(model, held.copy).values()
        whole = [rank for rank in ranks if rank.is_whole or rank is held]
        if len(whole) == life.knowledge.tp_size(model):
            life.failures.pop(model, None)

    def _load_failed(
        self, life: KnownFailures, now_ns: int, held: Held, instance: InstanceId
    ) -> None:
        """Loads that were under way together count as one. What is left of an instance that was
        given up, in whatever life, is taken back: no failure."""
        if instance in life.knowledge.ended or instance in self._dropped:
            return
        model = held.order.model
        is_due = self._may_loads_fail(model, self._ordered.get(instance, (0, 0))[0])
        require(is_due, "loads fail for a reason", held, model)
        row = self._next_of_row(life, model, instance)
        if row is not None:
            row.loads += 1
            row.beside_copy += bool(life.knowledge.copies(model))
            row.paused_ns = now_ns

    def _member_lost(self, life: KnownFailures, now_ns: int, member: WorkerRef) -> None:
        """A death is counted against the model that its worker was loading, unless its host leaves.
        The first one may be chance: nothing waits for it."""
        if member in life.knowledge.leaving:
            return
        for held in life.knowledge.on(member):
            model, instance = held.order.model, held.instance
            if instance is None or instance not in life.knowledge.loading(model):
                continue
            row = self._next_of_row(life, model, instance)
            if row is not None:
                row.deaths += 1
                if row.deaths >= DEATHS_MAX:
                    row.paused_ns = now_ns

    def _next_of_row(self, life: KnownFailures, model: str, instance: InstanceId) -> Row | None:
        """None for a load that was under way when another one failed."""
        _, ordered = self._ordered.get(instance, (0, 0))
        if ordered < life.last_failure.get(model, 0):
            return None
        row = life.failures.setdefault(model, Row())
        life.last_failure[model] = self._news
        return row

    def _check_pause(
        self, life: KnownFailures, now_ns: int, command: commands.StartHolding
    ) -> None:
        paused_ns = life.failures.get(command.model, Row()).paused_ns
        if paused_ns is not None:
            pause_ns = min(self._config.load_retry_ns, self._config.load_retry_ns_max)
            is_over = now_ns - paused_ns >= pause_ns
            require(is_over, "a pause follows a failed load", command, paused_ns)

    def _check_given_up(self, life: KnownFailures, command: commands.FailRequest) -> None:
        """Of stages one is enough: requests go through all of them."""
        first = life.knowledge.requested[command.request]
        stage = life.knowledge.specs[first].stage if first in life.knowledge.specs else None
        names = [first]
        if stage is not None:
            names = [stage_name(stage.model, number) for number in range(stage.count)]
        found = [self._why_not_given_up(life, name) for name in names]
        if found[0] is not None and None not in found:
            rule, shown = found[0]
            require(False, rule, command, shown)

    def _why_not_given_up(self, life: KnownFailures, model: str) -> tuple[str, object] | None:
        """The rule by which its requests wait, and what shows it; None if they need not."""
        knowledge, row = life.knowledge, life.failures.get(model, Row())
        is_dead = row.deaths >= DEATHS_MAX
        if not (row.loads >= self._config.load_failures_max or is_dead):
            return "a model is given up after failed loads", row
        if there := knowledge.instances(model):
            return "requests of a model with instances wait", there
        copies = knowledge.copies(model)
        if copies and not (row.beside_copy > 1 or is_dead):
            return "requests of a model with a host copy wait", copies
        return None
