"""What gateways are told of the pool: how it looks, whenever that has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from livescale.control.status import ControllerStatus, InstanceSummary
from livescale.messages.events import AnyEvent, InstanceReported
from livescale.runtime.model_loads import ModelLoads
from livescale.runtime.publication import Publication
from livescale.runtime.wire import PoolStatus
from livescale.types import InstanceId


class ShownStatus:
    """`send` reaches all gateways."""

    def __init__(self, publication: Publication, send: Callable[[PoolStatus], None]) -> None:
        self._publication = publication
        self._send = send
        self._loads = ModelLoads(publication.models)
        self._instances: Mapping[InstanceId, InstanceSummary] = {}
        #: what gateways were told last
        self.last: PoolStatus | None = None

    def absorb(
        self, events: Iterable[AnyEvent], instances: Mapping[InstanceId, InstanceSummary]
    ) -> None:
        """Count what the instances reported."""
        for event in events:
            if isinstance(event, InstanceReported):
                self._loads.absorb(event, instances)

    def forget(self, model: str) -> None:
        """The model has left the pool."""
        self._loads.forget(model)

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
            is_recording=is_recording,
        )
        if status != self.last:
            loads = self._loads.shown(seen.instances)
            self._tell(msgspec.structs.replace(status, loads=loads))

    def show_loads(self) -> None:
        """Tell what the instances hold, if it changed. It does all the time: not to be called at
        every step."""
        loads = self._loads.shown(self._instances)
        if self.last is not None and loads != self.last.loads:
            self._tell(msgspec.structs.replace(self.last, loads=loads))

    def _tell(self, status: PoolStatus) -> None:
        self.last = status
        self._send(status)
