"""One instance: its states, which moves between them are allowed, and what is known of it.

A pair that is not in `TRANSITIONS` raises, with the instance's story.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from livescale.messages.commands import Drain, Resume
from livescale.messages.events import (
    LayerArrived,
    LiveStarted,
    LoadCompleted,
    LoadFailed,
    LoadStarted,
    Released,
    WorkerLost,
)
from livescale.plans import Pairing
from livescale.types import InstanceId, InstanceState, PlanId, Role, Value, WorkerRef

_STORY_MAX = 32

TRANSITIONS: dict[InstanceState, dict[type[Value], InstanceState]] = {
    InstanceState.STARTING: {
        LoadStarted: InstanceState.LOADING,
        LiveStarted: InstanceState.LIVE,
        LoadFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.LOADING: {
        LiveStarted: InstanceState.LIVE,
        # An instance adopted as LOADING may report its first byte only now.
        LoadStarted: InstanceState.LOADING,
        LayerArrived: InstanceState.LOADING,
        LoadCompleted: InstanceState.SERVING,
        LoadFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    # LIVE: serves with the layers it has while the rest arrives (live scaling).
    InstanceState.LIVE: {
        LiveStarted: InstanceState.LIVE,
        LoadStarted: InstanceState.LIVE,
        LayerArrived: InstanceState.LIVE,
        LoadCompleted: InstanceState.SERVING,
        LoadFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.SERVING: {
        Drain: InstanceState.DRAINING,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.DRAINING: {
        Resume: InstanceState.SERVING,
        Released: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.STOPPED: {},
    InstanceState.LOST: {},
}

IS_LOADING = (InstanceState.STARTING, InstanceState.LOADING, InstanceState.LIVE)


class InvalidTransition(Exception):
    """An instance was asked for a move that its state does not allow."""


@dataclass(slots=True)
class Instance:
    """Workers, one per rank, that have been given a model, and what was last said of its load."""

    id: InstanceId
    model: str
    workers: tuple[WorkerRef, ...]
    layers: int
    attempt: int = 0
    role: Role = Role.UNIFIED
    state: InstanceState = InstanceState.STARTING
    #: per rank that said so: complete layers 0…n-1
    watermarks: dict[int, int] = field(default_factory=dict)
    #: ranks that have everything
    loaded_ranks: dict[int, None] = field(default_factory=dict)
    #: ranks whose workers hold nothing of it any more
    empty_ranks: dict[int, None] = field(default_factory=dict)
    #: the plan of its load
    plan: PlanId = 0
    #: how it works while it loads (None: it waits), how long that should take (None: not known),
    #: and since when bytes have come
    pairing: Pairing | None = None
    predicted_ns: int | None = None
    first_byte_ns: int | None = None
    #: DRAINING only: Release was ordered, there is no way back
    is_released: bool = False
    #: taken over from an earlier life of the controller; it has not said yet what it is doing
    is_unheard: bool = False
    #: last InstanceReported
    running: int = 0
    queued_prefill_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    kv_blocks_kept: int = 0
    left_out: int = 0
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_MAX))

    @property
    def worker(self) -> WorkerRef:
        """The worker of rank 0: it gets the instance's requests."""
        return self.workers[0]

    @property
    def watermark(self) -> int:
        """Layers that every rank has."""
        return min(self.watermarks.get(rank, 0) for rank in range(len(self.workers)))

    @property
    def is_loading(self) -> bool:
        return self.state in IS_LOADING

    @property
    def is_capacity(self) -> bool:
        """It serves or will: what the autoscaler counts."""
        return self.is_loading or self.state is InstanceState.SERVING

    def __repr__(self) -> str:
        return (
            f"<Instance {self.id} {self.state.name} of {self.model}"
            f" on {'+'.join(map(str, self.workers))},"
            f" {self.watermark}/{self.layers} layers, {self.running} requests>"
        )
