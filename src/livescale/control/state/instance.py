"""One instance: its states, which moves between them are allowed, and what is known of it.

A pair that is not in `TRANSITIONS` raises, with the instance's story.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from livescale.control.state.holdings import Copy
from livescale.messages.commands import ChangeDuty, Drain, ReleaseHolding, Resume
from livescale.messages.events import (
    FirstByteArrived,
    HoldingCompleted,
    HoldingDropped,
    HoldingFailed,
    LayerArrived,
    LiveStarted,
    StageCounts,
    WorkerLost,
)
from livescale.values.routes import Duty, Partner
from livescale.values.types import InstanceId, InstanceState, Part, Value, WorkerRef

_STORY_MAX = 32
_LEADERS_MAX = 32

TRANSITIONS: dict[InstanceState, dict[type[Value], InstanceState]] = {
    InstanceState.STARTING: {
        FirstByteArrived: InstanceState.LOADING,
        # Layers of a stage that have no bytes are there before any byte.
        LayerArrived: InstanceState.LOADING,
        LiveStarted: InstanceState.LIVE,
        # It was made of a warm spare: nothing arrives.
        HoldingCompleted: InstanceState.SERVING,
        HoldingFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.LOADING: {
        LiveStarted: InstanceState.LIVE,
        # An instance adopted as LOADING may report its first byte only now.
        FirstByteArrived: InstanceState.LOADING,
        LayerArrived: InstanceState.LOADING,
        HoldingCompleted: InstanceState.SERVING,
        HoldingFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    # LIVE: serves with the layers it has while the rest arrives (live scaling).
    InstanceState.LIVE: {
        LiveStarted: InstanceState.LIVE,
        FirstByteArrived: InstanceState.LIVE,
        LayerArrived: InstanceState.LIVE,
        HoldingCompleted: InstanceState.SERVING,
        HoldingFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.SERVING: {
        Drain: InstanceState.DRAINING,
        # What was loaded does not compute, which its first Run shows.
        HoldingFailed: InstanceState.STOPPED,
        WorkerLost: InstanceState.LOST,
    },
    InstanceState.DRAINING: {
        Resume: InstanceState.SERVING,
        # Its workers keep the bytes.
        ReleaseHolding: InstanceState.STOPPED,
        HoldingDropped: InstanceState.STOPPED,
        HoldingFailed: InstanceState.STOPPED,
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
    """Workers, one per rank, that have been given a model, and what they reported last."""

    part: Part
    duty: Duty
    copy: Copy
    state: InstanceState = InstanceState.STARTING
    #: how long the loads of its plan should take (None: not known), until when its own should be
    #: over (None: not known, or behind what is slower than links), since when bytes have come, and
    #: when the last layer that all ranks have was there; so many were there at once
    predicted_ns: int | None = None
    due_ns: int | None = None
    first_byte_ns: int | None = None
    layer_ns: int | None = None
    kept_layers: int = 0
    #: taken over from an earlier life of the controller; its workers have not reported yet
    is_unreported: bool = False
    #: last InstanceReported
    running: int = 0
    queued_prefill_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    kv_blocks_kept: int = 0
    left_out: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0
    stage_counts: StageCounts | None = None
    #: of pipelines and teams that the instance was in: their requests may still go through it
    past_leaders: deque[WorkerRef] = field(default_factory=lambda: deque(maxlen=_LEADERS_MAX))
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_MAX))

    def change(self, duty: Duty) -> ChangeDuty:
        """From now on this is its duty. Rank 0 is told: it alone deals with other instances."""
        gone = [leader for leader in _leaders(self.duty) if leader not in _leaders(duty)]
        self.past_leaders.extend(gone)
        self.duty = duty
        for holding in self.copy.ranks.values():
            holding.order = msgspec.structs.replace(holding.order, duty=duty)
        return ChangeDuty(self.copy.ranks[0].order.holding, duty)

    @property
    def leaders(self) -> list[WorkerRef]:
        """Other workers whose requests go, or may still go, through the instance."""
        return list(dict.fromkeys([*_leaders(self.duty), *self.past_leaders]))

    @property
    def id(self) -> InstanceId:
        return self.duty.instance

    @property
    def model(self) -> str:
        return self.part.model

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        return self.duty.workers

    @property
    def is_released(self) -> bool:
        """Its workers were ordered to drop it: there is no way back."""
        return self.copy.is_given_up

    @property
    def worker(self) -> WorkerRef:
        """The worker of rank 0: it gets the instance's requests."""
        return self.workers[0]

    @property
    def partner(self) -> Partner:
        """The instance as others send to it."""
        return Partner(self.id, self.worker)

    @property
    def watermark(self) -> int:
        """Layers that every rank has."""
        return self.copy.watermark

    @property
    def is_loading(self) -> bool:
        return self.state in IS_LOADING

    @property
    def is_waking(self) -> bool:
        """It was made of a warm spare and does not serve yet."""
        return self.is_loading and self.copy.is_complete

    @property
    def is_capacity(self) -> bool:
        """It serves or will: what the autoscaler counts."""
        return self.is_loading or self.state is InstanceState.SERVING

    def __repr__(self) -> str:
        return (
            f"<Instance {self.id} {self.state.name} of {self.model}"
            f" on {'+'.join(map(str, self.workers))},"
            f" {self.watermark}/{self.part.span.stop} layers, {self.running} requests>"
        )


def _leaders(duty: Duty) -> list[WorkerRef]:
    led = [pipeline.leader.worker for pipeline in duty.pipelines]
    if duty.team is not None:
        led.append(duty.team.leader.worker)
    return [leader for leader in led if leader not in duty.workers]
