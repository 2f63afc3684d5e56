"""Which orders wait for which streams.

A stream may begin before its order is known, and an order may come long before its stream. The
book matches them by (upstream, plan) and remembers streams that must be thrown away.
"""

from __future__ import annotations

import threading
import time

from livescale.transfer.reception import Reception
from livescale.types import PlanId, WorkerRef

_REFUSALS_MAX = 1024


class OrderBook:
    """Thread-safe. A plan is received at most once by a worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._receptions: dict[PlanId, Reception] = {}
        # Streams without a reception: (upstream, plan) -> why, oldest first.
        self._refused: dict[tuple[WorkerRef, PlanId], str] = {}
        self._is_closed = False

    def place(self, reception: Reception) -> str | None:
        """The reception waits for its stream; or the reason why it cannot."""
        order = reception.order
        with self._changed:
            if self._is_closed:
                return "the data plane is closed"
            refusal = self._refused.get((order.upstream, order.plan))
            if refusal is not None:
                return refusal
            for other in self._receptions.values():
                if other.order.plan == order.plan:
                    return f"plan {order.plan} is already being received"
                if _overlap(other, reception):
                    return f"plan {other.order.plan} is being received into the same memory"
            self._receptions[order.plan] = reception
            self._changed.notify_all()
            return None

    def claim(self, upstream: WorkerRef, plan: PlanId, wait_s: float) -> Reception | None:
        """The reception whose stream has begun, or None if the stream is to be thrown away.

        Waits up to `wait_s` for the order; after that the stream is refused.
        """
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while not self._is_closed and (upstream, plan) not in self._refused:
                reception = self._receptions.get(plan)
                if reception is not None and reception.order.upstream == upstream:
                    if reception.has_begun:
                        return None
                    reception.has_begun = True
                    return reception
                rest_s = deadline_s - time.monotonic()
                if rest_s <= 0:
                    self._remember(upstream, plan, f"no order came within {wait_s} s")
                    return None
                self._changed.wait(rest_s)
            return None

    def refuse(self, upstream: WorkerRef, plan: PlanId, reason: str) -> Reception | None:
        """A stream that has not begun will not come. Returns the reception that waited for it."""
        with self._changed:
            reception = self._receptions.get(plan)
            if reception is not None and reception.order.upstream == upstream:
                return reception
            self._remember(upstream, plan, reason)
            return None

    def strike(self, reception: Reception) -> None:
        """The reception is over. If its stream did not begin yet, it will be thrown away."""
        order = reception.order
        with self._changed:
            if self._receptions.get(order.plan) is not reception:
                return
            del self._receptions[order.plan]
            if reception.failure is not None and not reception.has_begun:
                self._remember(order.upstream, order.plan, reception.failure)

    def find(self, plan: PlanId) -> Reception | None:
        """The reception of this plan that is not over."""
        with self._changed:
            return self._receptions.get(plan)

    def all(self, upstream: WorkerRef | None = None) -> list[Reception]:
        """Receptions that are not over (from `upstream`), in plan order."""
        with self._changed:
            return [
                self._receptions[plan]
                for plan in sorted(self._receptions)
                if upstream is None or self._receptions[plan].order.upstream == upstream
            ]

    def close(self) -> None:
        """No order is placed and nobody waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _remember(self, upstream: WorkerRef, plan: PlanId, reason: str) -> None:
        self._refused[(upstream, plan)] = reason
        if len(self._refused) > _REFUSALS_MAX:
            del self._refused[next(iter(self._refused))]
        self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<OrderBook {len(self._receptions)} receptions, {len(self._refused)} refused>"


def _overlap(one: Reception, other: Reception) -> bool:
    first, second = one.order.manifest, other.order.manifest
    return (
        first.layers[0].offset_bytes < second.size_bytes
        and second.layers[0].offset_bytes < first.size_bytes
    )
