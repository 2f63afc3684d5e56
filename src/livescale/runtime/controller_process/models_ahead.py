"""Workers whose engines take long to make are told which models may come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from livescale.messages.events import WorkerJoined
from livescale.runtime.wire import protocol
from livescale.values.types import WorkerRef


class Told(Protocol):
    """The wire to a worker, as far as it is needed here."""

    def send(self, message: protocol.MayCome) -> None: ...


class ModelsAhead:
    """What each of them was told: every model once, those that are published later, too."""

    def __init__(self) -> None:
        #: the manifests' ids by the models' names
        self._told: dict[WorkerRef, dict[str, str]] = {}

    def tell(
        self,
        members: Mapping[WorkerRef, tuple[Told, protocol.MemberHello]],
        models: Iterable[protocol.PublishedModel],
    ) -> None:
        """Tell those of the `members` whatever is new to them; the others are gone."""
        engines = {ref: wire for ref, (wire, hello) in members.items() if _is_engine(hello)}
        self._told = {ref: self._told.get(ref, {}) for ref in engines}
        whole = [m.entry.manifest for m in models if not m.is_leaving]
        for ref, wire in engines.items():
            told = self._told[ref]
            for manifest in [its for its in whole if its.stage is None]:
                if told.get(manifest.model) != manifest.id:
                    told[manifest.model] = manifest.id
                    wire.send(protocol.MayCome(manifest))

    def __repr__(self) -> str:
        return f"<ModelsAhead for {len(self._told)} workers>"


def _is_engine(hello: protocol.MemberHello) -> bool:
    return isinstance(hello.joined, WorkerJoined) and hello.joined.is_engine
