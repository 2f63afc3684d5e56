"""Quotas of members that were told of a team or a pipeline before its leader was.

The leader's order may still be on its way, or never come: a controller may have died between its
two orders. A member keeps its blocks until it is answered, so each quota is used or answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.batching.contract.visit_messages import Disbanded, Quota
from livescale.batching.lines.visitors import Tell
from livescale.values.routes import Partner
from livescale.values.types import InstanceId, WorkerRef

_QUOTAS_MAX = 256


@dataclass(slots=True)
class EarlyQuota:
    """Who has granted it, and since when it waits (None: since the next look at the clock)."""

    peer: Partner
    quota: Quota
    since_ns: int | None = None


class EarlyQuotas:
    """For the leader `instance`. What waits for `answer_ns` is given up; `tell` sends the member
    that nothing comes."""

    def __init__(self, instance: InstanceId, answer_ns: int, tell: Tell) -> None:
        self._instance = instance
        self._answer_ns = answer_ns
        self._tell = tell
        #: number of all that the instance was told of: its orders come in order, so no order of a
        #: lower number comes any more
        self._newest = -1
        self._waiting: list[EarlyQuota] = []

    def __bool__(self) -> bool:
        """Some wait, and are to be answered."""
        return bool(self._waiting)

    def keep(self, peer: Partner, quota: Quota) -> bool:
        """The quota waits for the order. False if no order can come."""
        if quota.lead.leader != self._instance or quota.lead.number <= self._newest:
            return False
        self._waiting.append(EarlyQuota(peer, quota))
        self._give_up(self._waiting[:-_QUOTAS_MAX])
        return True

    def told(self, numbers: Sequence[int]) -> list[EarlyQuota]:
        """The instance has been told of these. Returns what does not wait any more."""
        self._newest = max([self._newest, *numbers])
        due = [one for one in self._waiting if one.quota.lead.number <= self._newest]
        self._waiting = [one for one in self._waiting if one not in due]
        return due

    def lost(self, worker: WorkerRef) -> None:
        """Nothing comes from this worker."""
        self._give_up([one for one in self._waiting if one.peer.worker == worker])

    def give_up_all(self) -> None:
        """The instance goes."""
        self._give_up(self._waiting)

    def look(self, now_ns: int) -> None:
        """Those that are late are given up; the others wait from now on at the latest."""
        for one in self._waiting:
            if one.since_ns is None:
                one.since_ns = now_ns
        self._give_up([one for one in self._waiting if self._is_late(one, now_ns)])

    def deadline_ns(self) -> int | None:
        """When the first of them is late."""
        since = [one.since_ns for one in self._waiting if one.since_ns is not None]
        return min(since) + self._answer_ns if since else None

    # -- helpers, in the order used -------------------------------------------------------------

    def _is_late(self, one: EarlyQuota, now_ns: int) -> bool:
        return one.since_ns is not None and now_ns >= one.since_ns + self._answer_ns

    def _give_up(self, given_up: Sequence[EarlyQuota]) -> None:
        """Their members get their blocks back."""
        self._waiting = [one for one in self._waiting if one not in given_up]
        for one in given_up:
            self._tell(one.peer, Disbanded(one.quota.lead))
