"""What must hold in every simulated world. A broken rule raises at once; nothing is repaired.

The rules are stated from the outside, from events, commands and what workers do, so that they
share no code with what they check.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.messages.commands import DropHolding, StartHolding
from livescale.policies import ModelPolicy
from livescale.types import HoldingId, RequestId, WorkerRef


class InvariantBroken(AssertionError):
    """A rule does not hold in a simulated world."""


def require(holds: bool, rule: str, *what: object) -> None:
    """Raise InvariantBroken with the rule and the values unless it holds."""
    if not holds:
        raise InvariantBroken(f"{rule}: {', '.join(map(repr, what))}")


class Checkers:
    """Rules about workers and agents, over all lives of the controller."""

    def __init__(self, models: Sequence[ModelPolicy]) -> None:
        self._tp_sizes = {policy.spec.name: policy.spec.tp_size for policy in models}
        self._model_of: dict[WorkerRef, str] = {}
        self._gone: dict[str, None] = {}
        #: what members have given up by themselves
        self._failed: dict[HoldingId, None] = {}

    def at_rest(self, worker: WorkerRef, kv_blocks_used: int) -> None:
        require(kv_blocks_used == 0, "no KV is in use when all is over", worker, kv_blocks_used)

    def assigned(self, worker: WorkerRef, is_taken: bool, order: StartHolding) -> None:
        require(not is_taken, "a worker belongs to one instance", worker, order)
        require(order.holding.member == worker, "orders reach their worker", worker, order)
        self._model_of[worker] = order.model

    def failed(self, holding: HoldingId) -> None:
        """The member has given it up."""
        self._failed[holding] = None

    def holds(
        self, agent: WorkerRef, memory_bytes: int, size_bytes: int, held: list[tuple[str, int]]
    ) -> None:
        """What lies in the memory of the agent's host now."""
        require(size_bytes <= memory_bytes, "host memory is not overdrawn", agent, size_bytes)
        require(len(set(held)) == len(held), "a host holds a rank of a model once", agent, held)

    def gone(self, model: str) -> None:
        """Nothing of the model is left, as far as the controller knows."""
        self._gone[model] = None

    def dropped(
        self,
        order: DropHolding,
        held: HoldingId | None,
        requests: Sequence[tuple[RequestId, int]],
    ) -> None:
        """A worker that holds this is told to drop something."""
        # When one rank is lost, the others are dropped with all that they were asked; their own
        # load may have failed meanwhile.
        model = self._model_of[order.holding.member]
        is_whole = self._tp_sizes[model] == 1
        has_failed = held is None and order.holding in self._failed
        if (is_whole or held is not None) and not has_failed:
            require(order.holding == held, "a worker drops what it holds", order, held)
        # A model may be gone for a controller that a worker with requests finds very late.
        if is_whole and model not in self._gone:
            require(not requests, "an instance with requests is not released", order, requests)
