"""The cores that a worker computes with: ordered, used, reported."""

from __future__ import annotations

from collections.abc import Callable

from livescale.member import effects
from livescale.member.inputs import CoresSet
from livescale.messages.commands import SetCores
from livescale.messages.events import CoresChanged
from livescale.values.types import WorkerRef


class MemberCores:
    """Of one life of a worker, which begins with `own` cores."""

    def __init__(self, ref: WorkerRef, own: int, emit: Callable[[effects.Effect], None]) -> None:
        self.own = self.now = own
        self._ref = ref
        self._emit = emit

    def obey(self, order: SetCores) -> None:
        """An order, also while Runs are in flight: the next one follows it."""
        self._emit(effects.UseCores(order.cores))

    def set(self, news: CoresSet) -> None:
        """The executor has obeyed."""
        self.now = news.cores
        self._report(news.asked)

    def met_controller(self) -> None:
        """What was reported while there was no controller may be lost."""
        if self.now != self.own:
            self._report()

    def _report(self, asked: int = 0) -> None:
        self._emit(effects.Report(CoresChanged(self._ref, self.now, asked)))
