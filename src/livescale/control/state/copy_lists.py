"""All copies by model, and lists of those that are asked for often.

A model may have hundreds of copies, and a pool hundreds of models: only the copies that changed are
looked at again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping
from dataclasses import dataclass

from livescale.control.state.holdings import Copy
from livescale.values.types import InstanceId, WorkerRef


@dataclass(frozen=True, slots=True)
class CopyList:
    """A model's copies in the order of their holders: those that may be read, arriving ones
    included, of these the ones in the memory of the pool's hosts, and the complete ones on devices.
    The `lasting` ones are complete, on devices or hosts, and no guest's."""

    there: list[Copy]
    on_hosts: list[Copy]
    on_devices: list[Copy]
    lasting: list[Copy]

    def with_changed(
        self, copies: Mapping[Copy, bool], guests: Container[WorkerRef] = ()
    ) -> CopyList:
        """The lists after these copies changed; False: the copy was removed."""
        there, on_hosts = [*self.there], [*self.on_hosts]
        on_devices, lasting = [*self.on_devices], [*self.lasting]
        for copy, is_kept in copies.items():
            is_there, is_complete = is_kept and copy.is_there, is_kept and copy.is_complete
            is_guests = copy.holder in guests
            _list(there, copy, is_there)
            _list(on_hosts, copy, is_there and copy.is_on_host and not is_guests)
            _list(on_devices, copy, is_complete and not copy.is_on_host)
            _list(lasting, copy, is_complete and not is_guests)
        return CopyList(there, on_hosts, on_devices, lasting)


_NO_COPIES = CopyList([], [], [], [])


class CopyLists:
    """Copies by model and by what names them. What changes a copy calls `changed`."""

    def __init__(self) -> None:
        #: grows with every change of a copy
        self.version = 0
        #: agents whose copies are for themselves
        self.guests: dict[WorkerRef, None] = {}
        self._copies: dict[str, dict[InstanceId | WorkerRef, Copy]] = {}
        #: of each model: `version` at its last change, its lists, and the copies that have changed
        #: since these were made
        self._versions: dict[str, int] = {}
        self._lists: dict[str, CopyList] = {}
        self._changed: dict[str, dict[Copy, None]] = {}

    def changed(self, copy: Copy) -> None:
        """The copy is new, has other ranks, or one of these is in another state."""
        self.touch(copy.model)
        self._changed.setdefault(copy.model, {})[copy] = None

    def touch(self, model: str) -> None:
        """What depends on the model's copies must look again."""
        self.version += 1
        self._versions[model] = self.version

    def version_of(self, model: str) -> int:
        """Grows with every change of the model's copies."""
        return self._versions.get(model, 0)

    def add(self, copy: Copy) -> None:
        self._copies.setdefault(copy.model, {})[copy.key] = copy

    def remove(self, copy: Copy) -> None:
        """Nothing happens if it is not there."""
        copies = self._copies.get(copy.model, {})
        if copies.get(copy.key) is copy:
            del copies[copy.key]

    def find(self, model: str, key: InstanceId | WorkerRef) -> Copy | None:
        return self._copies.get(model, {}).get(key)

    def of(self, model: str) -> CopyList:
        """Lists of the model's copies, which stay as they are: another change makes others."""
        known, changed = self._lists.get(model, _NO_COPIES), self._changed.pop(model, None)
        if changed is None:
            return known
        kept = {copy: self.find(model, copy.key) is copy for copy in changed}
        known = self._lists[model] = known.with_changed(kept, self.guests)
        return known

    def has_any(self, model: str) -> bool:
        """Copies that are given up and not gone included."""
        return bool(self._copies.get(model))

    def forget_model(self, model: str) -> None:
        """The model has no copy left."""
        assert not self._copies.get(model), f"{self._copies[model]} are left"
        self._copies.pop(model, None)
        self._versions.pop(model, None)
        self._lists.pop(model, None)
        self._changed.pop(model, None)

    def __repr__(self) -> str:
        held = ", ".join(f"{model}: {len(copies)}" for model, copies in self._copies.items())
        return held or "empty"


def _list(copies: list[Copy], copy: Copy, is_listed: bool) -> None:
    """The copy stands in this list from now on, in its holder's place, or does not."""
    first = bisect_left(copies, copy.holder, key=_holder)
    end = bisect_right(copies, copy.holder, lo=first, key=_holder)
    place = next((at for at in range(first, end) if copies[at] is copy), None)
    if is_listed and place is None:
        copies.insert(end, copy)
    elif place is not None and not is_listed:
        del copies[place]


def _holder(copy: Copy) -> WorkerRef:
    return copy.holder
