"""What targets offer to one source, and the window of its pulls that are under way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from livescale.batching.contract.live_messages import Offer
from livescale.batching.runs.kv_room import KvRoom
from livescale.batching.runs.run import BatchKey
from livescale.values.types import WorkerRef

_OFFERS_MAX = 256
"""Batches that one target has to offer at once, at most; what it offers beyond is not kept."""


@dataclass(slots=True)
class PullUnderWay:
    """A pull whose batch has not come yet, and the blocks that wait for the batch. A Run was in
    flight when it was sent, with prefill work of `in_flight_ns`. KV of the layers `kv_asked` comes
    unasked, or was asked for; that of a batch that `is_promised` may come ahead (`kv_came`: when).
    """

    peer: WorkerRef
    offer: Offer
    reservation: int
    asked_ns: int
    without_rows: bool
    in_flight_ns: int = 0
    kv_asked: dict[int, None] = field(default_factory=dict)
    kv_came: dict[int, int] = field(default_factory=dict)
    is_promised: bool = False

    @property
    def kv_tokens(self) -> tuple[int, ...]:
        """Of requests that decode: positions whose KV comes, each."""
        return tuple(tokens - 1 for tokens in self.offer.tokens)


class PullWindow:
    """Chooses what to pull: of up to `pulls_max` batches the rows may be on their way at once."""

    def __init__(self, room: KvRoom, pulls_max: int) -> None:
        self._room = room
        self._pulls_max = pulls_max
        self._offers: dict[WorkerRef, dict[BatchKey, Offer]] = {}
        #: the first one asked first
        self.under_way: dict[BatchKey, PullUnderWay] = {}
        #: no rows are to come: their KV would be too much for the link
        self.is_held_up = False

    @property
    def is_idle(self) -> bool:
        """Nothing is offered or under way."""
        return not (self._offers or self.under_way)

    @property
    def is_full(self) -> bool:
        """As many batches as may be are on their way with their rows."""
        pulls = self.under_way.values()
        rows_coming = sum(not (pull.without_rows or pull.offer.decoding) for pull in pulls)
        return self.is_held_up or rows_coming >= self._pulls_max

    def offered_by(self, peer: WorkerRef) -> int:
        """How many batches this target offers."""
        return len(self._offers.get(peer, ()))

    def targets(self) -> list[tuple[WorkerRef, BatchKey]]:
        """Targets that offer something, and one batch of each."""
        return [(peer, min(self._offers[peer])) for peer in sorted(self._offers)]

    def keep(self, peer: WorkerRef, offer: Offer) -> None:
        """The target offers this batch."""
        if len(self._offers.setdefault(peer, {})) < _OFFERS_MAX:
            self._offers[peer][offer.batch] = offer

    def drop(self, peer: WorkerRef, key: BatchKey) -> None:
        """The target does not offer this batch any more."""
        offers = self._offers.get(peer, {})
        if offers.pop(key, None) is not None and not offers:
            del self._offers[peer]

    def drop_all(self, peer: WorkerRef) -> None:
        """The target offers nothing any more."""
        self._offers.pop(peer, None)

    def choose(self, is_calm: bool) -> tuple[WorkerRef, Offer] | None:
        """What to pull next: requests that decode before others. Prompts if it `is_calm`: of those
        from whom the fewest are under way the first in line that there is room for. Without rows
        the last in line, if its turn is far away."""
        for peer, offers in sorted(self._offers.items()):
            for offer in offers.values():
                if offer.decoding and self._room.fits(offer.needs):
                    return peer, offer
        return self._prompts() if is_calm else None

    def _prompts(self) -> tuple[WorkerRef, Offer] | None:
        pulls = Counter(pull.peer for pull in self.under_way.values())
        for peer in sorted(self._offers, key=lambda peer: (pulls[peer], peer)):
            kept = self._offers[peer].items()
            offers = {key: offer for key, offer in kept if not offer.decoding}
            if len(offers) < (2 if self.is_full else 1):
                continue
            offer = offers[max(offers) if self.is_full else min(offers)]
            if self._room.fits(offer.needs):
                return peer, offer
        return None

    def begin(self, pull: PullUnderWay) -> None:
        """The pull was sent."""
        self.drop(pull.peer, pull.offer.batch)
        self.under_way[pull.offer.batch] = pull

    def end(self, peer: WorkerRef, key: BatchKey) -> PullUnderWay | None:
        """The target answers. None: no such pull was sent."""
        pull = self.under_way.get(key)
        if pull is None or pull.peer != peer:
            return None
        self.drop(peer, key)
        return self.under_way.pop(key)

    def token_layers(self, layers: int, done: int) -> int:
        """Prefill work that is on its way, if of batches with rows `done` of `layers` are done."""
        return sum(
            sum(pull.offer.tokens) * (layers if pull.without_rows else layers - done)
            for pull in self.under_way.values()
            if not pull.offer.decoding
        )
