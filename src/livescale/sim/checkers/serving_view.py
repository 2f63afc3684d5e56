"""An instance on a simulated worker, as the checker of live pairs sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.member.serving import Serving
from livescale.plans import Pairing
from livescale.types import InstanceId


class Idling(Protocol):
    """A worker that may be without a Run."""

    @property
    def is_idle(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ServingView:
    """What a LiveChecker looks at."""

    worker: Idling
    serving: Serving

    @property
    def instance(self) -> InstanceId:
        return self.serving.duty.instance

    @property
    def pairing(self) -> Pairing | None:
        return self.serving.duty.pairing

    @property
    def is_idle(self) -> bool:
        return self.worker.is_idle

    @property
    def waits_for_layer(self) -> tuple[tuple[int, int], ...]:
        """Requests of its first batch, if it can run no decoder layer yet and has a source that may
        pull: known tokens of each, and those that it can ever need KV for."""
        live, pairing = self.serving.live, self.pairing
        line = live.batches.line
        if live.loaded or live.giver.is_parted or not line or pairing is None:
            return ()
        if pairing.order == "overlap":
            return ()
        return tuple((s.known_tokens, s.tokens_max) for s in line[0].sequences)

    def has_room(self, needs: Sequence[tuple[int, int]]) -> bool:
        """The instance is complete, and requests with such needs fit beside its own."""
        live = self.serving.live
        return live.is_full and live.batcher.room.fits(needs)
