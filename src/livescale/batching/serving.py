"""What a member needs of whatever computes for an instance: one interface for every engine.

Ours is the LiveBatcher: continuous batching, KV room and the passing of live batches. An engine
that schedules by itself gives Runs that stand for its steps, takes `whole_model_only`, and passes
nothing: its outbox is empty, and it answers messages of peers by `live_messages.refusal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.batching.live_messages import LiveMessage
from livescale.batching.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.messages.events import InstanceReported
from livescale.routes import Taker
from livescale.types import RequestId, WorkerRef

KvPlaces = tuple[tuple[int, tuple[int, ...]], ...]
"""Per request: positions, and the blocks in which they lie (none: it has ended)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a member asks about an instance.

    `whole_model_only`: no request is taken before every layer is there. `prefill_tokens_per_s` is
    what its Runs took so far (None: not known).
    """

    whole_model_only: bool
    kv_blocks: int
    prefill_tokens_per_s: int | None


class Serving(Protocol):
    """Decides the Runs of one instance. Pure: time comes as an argument."""

    @property
    def capabilities(self) -> Capabilities: ...

    def layers_arrived(self, watermark: int) -> None:
        """Layers 0…watermark-1 are complete and may be run."""

    def add(self, spec: SequenceSpec) -> None:
        """Accept a request; ValueError when it can never run here. A newer attempt of a request
        takes the place of an older one."""

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """Forget the request. False when it is not here, or another instance's by now."""

    def requests(self) -> list[tuple[RequestId, int]]:
        """(request, attempt) of everything that is this instance's."""

    def give_back(self) -> list[tuple[RequestId, int]]:
        """Forget everything, between two Runs. Returns what must run elsewhere."""

    def next(self, steps_max: int = 1) -> Run | None:
        """The next Run, of up to `steps_max` steps; None when nothing could run now. While one is
        in flight: one that can be carried out behind it."""

    def shorten(self, run: Run, steps: int) -> Run:
        """The Run in flight ends after so many of its steps; the one that is returned is `done`."""

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        """The first Run in flight is over: per sampling segment a token per step. Its last step
        took `elapsed_ns`."""

    def report(self) -> InstanceReported:
        """The load now. What was admitted and started since the last report is in this one."""

    # -- partners -------------------------------------------------------------------------------

    def work_alone(self) -> None:
        """While layers are missing: no other instance pulls from here any more. What none has
        pulled is returned. Between two Runs."""

    def drain_to(self, takers: Sequence[Taker]) -> None:
        """Become empty: what is here moves to these, or is returned. None: keep it. Between two
        Runs."""

    def take_returned(self) -> Sequence[tuple[RequestId, int]]:
        """What was forgotten since the last call, and is to run elsewhere."""

    @property
    def is_alone(self) -> bool:
        """There is nothing to tell another instance, and nothing that one should tell."""

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """Positions whose rows, or whose KV of one layer, come with the message; None if they are
        not wanted. Raises UnexpectedMessage for a message that cannot be."""

    def take_message(self, peer: WorkerRef, message: LiveMessage, now_ns: int) -> int | None:
        """A message of another instance; what came along is written. Raises UnexpectedMessage.

        Returns how long the pull of a batch took, in ns, that is this instance's from now on.
        Requests that were decoding have tokens which may still be on their way to the gateway from
        where they were: the gateway gets all of them again, before any further ones.
        """

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        """Nothing more comes from this worker or goes there. One that `is_reachable` is told what
        does not come."""

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        """What is to be sent to whom, since the last call. To be called whenever something
        happened: after messages, after `done`, and after `next`."""

    def deadline_ns(self) -> int | None:
        """When a partner's answer is late: then `take_outbox` is to be called."""

    def holds(self, key: BatchKey) -> bool:
        """Rows or KV of this batch may still be wanted here."""

    def kv_places(self, key: BatchKey) -> KvPlaces:
        """Of a batch that changes hands, in the order of a `KvLayer`'s bytes."""
