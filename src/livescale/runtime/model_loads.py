"""What the instances of each model reported and took, summed up for people to look at. Decides
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from livescale.control.status import InstanceSummary
from livescale.messages.events import InstanceReported
from livescale.runtime.wire import ModelLoad
from livescale.types import InstanceId

_Counts = tuple[int, int, int, int, int]
_NOTHING: _Counts = (0, 0, 0, 0, 0)


class ModelLoads:
    """The loads of all models. Counts only grow, also when the instance that counted is gone.

    `now_ns` reads a monotonic clock. Models that are not named at the start come with their first
    instance.
    """

    def __init__(
        self, models: Iterable[str], now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._totals: dict[str, _Counts] = dict.fromkeys(models, _NOTHING)
        #: what each instance counted so far, by its last report
        self._seen: dict[InstanceId, _Counts] = {}
        self._now_ns = now_ns
        self._shown_ns = now_ns()
        self._device_ns = dict.fromkeys(self._totals, 0)
        #: devices of each model's instances since `_shown_ns`
        self._devices: dict[str, int] = {}

    def absorb(
        self, report: InstanceReported, instances: Mapping[InstanceId, InstanceSummary]
    ) -> None:
        """Count what is new in the report; nothing if its instance is not known (any more)."""
        instance = instances.get(report.instance)
        if instance is None:
            return
        counts = _counts(report)
        known = self._seen.get(report.instance, _NOTHING)
        total = self._totals.get(instance.model, _NOTHING)
        self._totals[instance.model] = _grown(total, counts, known)
        self._seen[report.instance] = counts

    def shown(self, instances: Mapping[InstanceId, InstanceSummary]) -> dict[str, ModelLoad]:
        """The loads, given the living instances; what is known of others is forgotten.

        Devices are counted from call to call: to be called whenever instances come or go.
        """
        self._pass_time(instances)
        self._seen = {number: seen for number, seen in self._seen.items() if number in instances}
        for instance in instances.values():
            self._totals.setdefault(instance.model, _NOTHING)
        blocks = dict.fromkeys(self._totals, (0, 0))
        for instance in instances.values():
            used, total = blocks[instance.model]
            blocks[instance.model] = (used + instance.kv_blocks_used, total + instance.kv_blocks)
        return {
            model: ModelLoad(*blocks[model], *counts, device_ns=self._device_ns.get(model, 0))
            for model, counts in self._totals.items()
        }

    def forget(self, model: str) -> None:
        """Nothing is left of the model, which begins anew if it comes again."""
        self._totals.pop(model, None)
        self._device_ns.pop(model, None)
        self._devices.pop(model, None)

    def _pass_time(self, instances: Mapping[InstanceId, InstanceSummary]) -> None:
        now_ns = self._now_ns()
        for model, devices in self._devices.items():
            elapsed_ns = now_ns - self._shown_ns
            self._device_ns[model] = self._device_ns.get(model, 0) + devices * elapsed_ns
        self._shown_ns = now_ns
        self._devices = {}
        for instance in instances.values():
            held = self._devices.get(instance.model, 0)
            self._devices[instance.model] = held + instance.devices


def _counts(report: InstanceReported) -> _Counts:
    """In the order in which ModelLoad has them."""
    return (
        report.preemptions,
        report.prefix_lookup_tokens,
        report.reused_tokens,
        report.handovers,
        report.handover_bytes,
    )


def _grown(total: _Counts, counts: _Counts, known: _Counts) -> _Counts:
    """The total with what is new in an instance's counts, of which `known` was there before."""
    a, b, c, d, e = (
        old + max(0, count - before)
        for old, count, before in zip(total, counts, known, strict=True)
    )
    return a, b, c, d, e
