"""What a worker asks its data plane for, and whom the data plane tells.

Values and interfaces only.
"""

from __future__ import annotations

from typing import Protocol

from livescale.types import Manifest, PlanId, Value, WorkerRef

ABORTED = "aborted"
"""The reason that listeners get when the worker itself called `abort`."""


class ReceiveOrder(Value, frozen=True):
    """Plan `plan` arrives from `upstream`; forward it to `forward_to` while it arrives."""

    plan: PlanId
    manifest: Manifest
    upstream: WorkerRef
    forward_to: WorkerRef | None = None


class SendOrder(Value, frozen=True):
    """Send all layers of `manifest`, which this arena holds, to `target`."""

    plan: PlanId
    manifest: Manifest
    target: WorkerRef


class ReceiveListener(Protocol):
    """Told of one ReceiveOrder, from the data plane's threads; must not block.

    Exactly one of `completed` and `failed` is called; the calls up to it never overlap and
    nothing but `forward_ended` follows it. With `forward_to`, `forward_ended` is called exactly
    once, at any time, maybe while another call is under way.
    """

    def first_byte(self) -> None:
        """The first chunk is arriving."""

    def layer_arrived(self, layer: int) -> None:
        """The layer is complete in the arena and its checksum agrees. In ascending order."""

    def completed(self, received_bytes: int) -> None:
        """All layers have arrived. Forwarding may still go on."""

    def failed(self, reason: str) -> None:
        """The plan failed here; nothing is written into the arena for it any more."""

    def forward_ended(self, sent_bytes: int, error: str | None) -> None:
        """All bytes were handed to the network, or `error` says why not."""


class SendListener(Protocol):
    """Told of one SendOrder, from the data plane's threads; must not block."""

    def ended(self, sent_bytes: int, error: str | None) -> None:
        """All bytes were handed to the network, or `error` says why not. Exactly once."""


class ChunkObserver(Protocol):
    """Sees every chunk that was received in place, for tests and benchmarks; must not block."""

    def __call__(self, layer: int, offset_bytes: int, size_bytes: int, at_ns: int) -> None:
        """`at_ns` is `time.monotonic_ns()` when the whole chunk lay in the arena."""
