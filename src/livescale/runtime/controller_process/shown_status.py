"""What gateways are told of the pool, whenever that has changed: how it looks, and what the
instances of each model reported and took, summed up. Decides nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from livescale.control.reports.status import ControllerStatus, InstanceSummary, ModelSummary
from livescale.messages.commands import AnyCommand, ModelGone, ScaleDecided
from livescale.messages.events import AnyEvent, InstanceReported
from livescale.runtime.models.publication import Publication
from livescale.runtime.wire.protocol import ModelLoad, PoolStatus, SpareStatus
from livescale.values.types import InstanceId


class ShownStatus:
    """`send` reaches all gateways."""

    def __init__(self, publication: Publication, send: Callable[[PoolStatus], None]) -> None:
        self._publication = publication
        self._send = send
        #: what instances reported
        self.loads = ModelLoads(publication.models)
        self._instances: Mapping[InstanceId, InstanceSummary] = {}
        #: the last one of each model
        self._decisions: dict[str, str] = {}
        #: what gateways were told last
        self.last: PoolStatus | None = None

    def absorb(
        self,
        events: Iterable[AnyEvent],
        commands: Iterable[AnyCommand],
        instances: Mapping[InstanceId, InstanceSummary],
    ) -> None:
        """Count what the instances reported, and note what was decided."""
        for command in commands:
            if isinstance(command, ScaleDecided):
                change = f"{command.from_instances} -> {command.to_instances}"
                self._decisions[command.model] = f"{change}: {command.reason}"
            elif isinstance(command, ModelGone):
                self._decisions.pop(command.model, None)
        for event in events:
            if isinstance(event, InstanceReported):
                self.loads.absorb(event, instances)

    def show(self, seen: ControllerStatus, is_recording: bool | None) -> None:
        """Tell what the pool looks like, when more than loads has changed."""
        self._instances = seen.instances
        models = seen.models.items()
        status = PoolStatus(
            instances={model: one.instances for model, one in models},
            workers=seen.workers,
            loads=self.last.loads if self.last is not None else {},
            agents=seen.agents,
            copies={model: one.host_copies for model, one in models},
            unready=self._publication.unready(),
            problems={model: one.problem for model, one in models if one.problem is not None},
            failed_loads={model: one.failed_loads for model, one in models},
            spares={model: _spares(one) for model, one in models},
            is_recording=is_recording,
            workers_wanted=seen.workers_wanted,
            by_role={model: one.by_role for model, one in models},
            decisions={m: self._decisions[m] for m, _ in models if m in self._decisions},
        )
        if status != self.last:
            loads = self.loads.shown(seen.instances)
            self._tell(msgspec.structs.replace(status, loads=loads))

    def show_loads(self) -> None:
        """Tell what the instances hold, if it changed. It does all the time: not to be called at
        every step."""
        loads = self.loads.shown(self._instances)
        if self.last is not None and loads != self.last.loads:
            self._tell(msgspec.structs.replace(self.last, loads=loads))

    def _tell(self, status: PoolStatus) -> None:
        self.last = status
        self._send(status)


def _spares(model: ModelSummary) -> SpareStatus:
    return SpareStatus(model.warm_spares, model.spare_bytes, model.starts, model.warm_starts)


_COUNTED = (
    "preemptions",
    "prefix_lookup_tokens",
    "reused_tokens",
    "handovers",
    "handover_bytes",
)
"""Fields of a report that its instance counts up, and of the ModelLoad with their sums; besides
them what a stage counts."""


_OF_STAGES = ("came", "gaps_ns", "gaps_squared_ns_s", "busy_ns", "waited_ns", "merged")


class ModelLoads:
    """The loads of all models. Counts only grow, also when the instance that counted is gone.

    `now_ns` reads a monotonic clock. Models that are not named at the start come with their first
    instance.
    """

    def __init__(
        self, models: Iterable[str], now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        #: by model and field of its ModelLoad
        self._totals: dict[str, Counter[str]] = {model: Counter() for model in models}
        #: what each instance counted so far, by its last report
        self._seen: dict[InstanceId, Counter[str]] = {}
        self._now_ns = now_ns
        self._shown_ns = now_ns()
        #: devices of each model's instances since `_shown_ns`
        self._devices: Counter[str] = Counter()

    def absorb(
        self, report: InstanceReported, instances: Mapping[InstanceId, InstanceSummary]
    ) -> None:
        """Count what is new in the report; nothing if its instance is not known (any more)."""
        instance = instances.get(report.instance)
        if instance is None:
            return
        counts = Counter({name: getattr(report, name) for name in _COUNTED})
        if report.stage is not None:
            stage = report.stage
            counts.update(visits=stage.done)
            counts.update({name: getattr(stage, name) for name in _OF_STAGES})
        # A difference of counters has no negative counts.
        new = counts - self._seen.get(report.instance, Counter())
        self._totals.setdefault(instance.model, Counter()).update(new)
        self._seen[report.instance] = counts

    def shown(self, instances: Mapping[InstanceId, InstanceSummary]) -> dict[str, ModelLoad]:
        """The loads, given the living instances; what is known of others is forgotten.

        Devices are counted from call to call: to be called whenever instances come or go.
        """
        now_ns = self._now_ns()
        for model, devices in self._devices.items():
            self._totals[model]["device_ns"] += devices * (now_ns - self._shown_ns)
        self._shown_ns = now_ns
        self._seen = {number: seen for number, seen in self._seen.items() if number in instances}
        self._devices.clear()
        used: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for instance in instances.values():
            self._totals.setdefault(instance.model, Counter())
            self._devices[instance.model] += instance.devices
            used[instance.model] += instance.kv_blocks_used
            blocks[instance.model] += instance.kv_blocks
        return {
            model: ModelLoad(used[model], blocks[model], **totals)
            for model, totals in self._totals.items()
        }

    def forget(self, model: str) -> None:
        """Nothing is left of the model, which begins anew if it comes again."""
        self._totals.pop(model, None)
        self._devices.pop(model, None)
