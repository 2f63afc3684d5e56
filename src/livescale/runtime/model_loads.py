"""What the instances of each model reported, summed up for people to look at. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from livescale.control.fleet import Instance
from livescale.messages.events import InstanceReported
from livescale.runtime.wire import ModelLoad
from livescale.types import InstanceId

_Counts = tuple[int, int, int]


class ModelLoads:
    """The loads of all models. Counts only grow, also when the instance that counted is gone."""

    def __init__(self, models: Iterable[str]) -> None:
        self._totals: dict[str, _Counts] = dict.fromkeys(models, (0, 0, 0))
        #: what each instance counted so far, by its last report
        self._seen: dict[InstanceId, _Counts] = {}

    def absorb(self, report: InstanceReported, instances: Mapping[InstanceId, Instance]) -> None:
        """Count what is new in the report; nothing if its instance is not known (any more)."""
        instance = instances.get(report.instance)
        if instance is None or instance.attempt != report.attempt:
            return
        counts = (report.preemptions, report.prefix_lookup_tokens, report.reused_tokens)
        known = self._seen.get(report.instance, (0, 0, 0))
        self._totals[instance.model] = _sum(
            self._totals[instance.model],
            *(max(0, count - before) for count, before in zip(counts, known, strict=True)),
        )
        self._seen[report.instance] = counts

    def shown(self, instances: Mapping[InstanceId, Instance]) -> dict[str, ModelLoad]:
        """The loads, given the living instances; what is known of others is forgotten."""
        self._seen = {number: seen for number, seen in self._seen.items() if number in instances}
        blocks = dict.fromkeys(self._totals, (0, 0))
        for instance in instances.values():
            used, total = blocks[instance.model]
            blocks[instance.model] = (used + instance.kv_blocks_used, total + instance.kv_blocks)
        return {model: ModelLoad(*blocks[model], *counts) for model, counts in self._totals.items()}


def _sum(total: _Counts, preemptions: int, looked_up: int, reused: int) -> _Counts:
    return (total[0] + preemptions, total[1] + looked_up, total[2] + reused)
