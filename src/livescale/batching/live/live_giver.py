"""The target's side of live pairs: what others may have of its line, and what it has given away.

A batch is offered to every source that wants it: the first Pull gets it, later ones are answered
Gone. No Runs are chosen here: that is the LiveBatcher's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from livescale.batching.contract import live_messages as messages
from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.contract.live_order import LiveOrder
from livescale.batching.live.decode_giver import DecodeGiver
from livescale.batching.live.live_batch import LiveBatch
from livescale.batching.live.live_batches import LiveBatches, offer_of
from livescale.batching.live.live_drainer import LiveDrainer
from livescale.batching.live.live_mover import LiveMover
from livescale.batching.runs.run import BatchKey
from livescale.values.routes import Partner
from livescale.values.types import InstanceId, LayerSpan, WorkerRef


class LiveGiver:
    """Gives batches of the line away, and others that are put together for that."""

    def __init__(
        self,
        batches: LiveBatches,
        order: LiveOrder | None,
        mover: LiveMover,
        drainer: LiveDrainer,
        decode_giver: DecodeGiver,
    ) -> None:
        self._held = batches.batcher.held
        self._batches = batches
        self._instance = batches.instance
        self._layers = batches.batcher.span.stop - 2
        self._order = order
        self._mover = mover
        self._drainer = drainer
        self._decode_giver = decode_giver
        #: instances that may pull, and what each was offered
        self._sources: dict[WorkerRef, InstanceId] = {}
        self._offered: dict[WorkerRef, dict[BatchKey, messages.Offer]] = {}
        #: batches handed over so far
        self.handovers = 0

    @property
    def is_parted(self) -> bool:
        """No source pulls from here (any more)."""
        return not self._sources

    def pair(self, source: Partner) -> None:
        """This one may pull, too."""
        self._sources[source.worker] = source.instance
        self._offered[source.worker] = {}

    def part(self) -> None:
        """No source may pull any more."""
        for source in sorted(self._sources):
            self._batches.tell(source, messages.Parted(self._instance))
            self._leave(source)

    def pullable(self, loaded: int) -> list[LiveBatch]:
        """What sources may have, in this order, once no Run is in flight. `loaded` decoder layers
        can run here."""
        assert self._order is not None
        line = [batch for batch in self._batches.line if not batch.stays]
        progress = [batch.progress() for batch in line]
        found = []
        while (index := self._order.source_pull(progress, loaded, self._layers)) is not None:
            found.append(line.pop(index))
            del progress[index]
        return found

    def offer(self, loaded: int, *, is_over: bool) -> list[tuple[WorkerRef, InstanceId]]:
        """Tell the sources what they can have, where that has changed.

        `loaded` decoder layers can run here. `is_over`: no further batch will come. Returns the
        sources if everything is done, and this one parts from them.
        """
        if not self._sources or self._order is None:
            return []
        if is_over and not self._batches.line and not self._batches.given:
            partners = sorted(self._sources.items())
            self.part()
            return partners
        batches = self.pullable(loaded)
        for source in sorted(self._sources):
            self._offer_to(source, [batch for batch in batches if source not in batch.declined])
        return []

    def keep_promises(self, loaded: int, now_ns: int) -> None:
        """Requests that were promised go when they have their first token; others that decode
        elsewhere are offered. Between two Runs."""
        for promise in self._decode_giver.talk():
            self._hand_over(promise.peer, promise.batch, promise.kv_layers, loaded, now_ns)

    def give(self, peer: WorkerRef, batch: LiveBatch, now_ns: int) -> None:
        """A request of a team that ends is the peer's, which has its blocks: nothing is pulled."""
        self._batches.ready.pop(batch.key)
        self._hand_over(peer, batch, (), 0, now_ns)

    # -- the source's messages ------------------------------------------------------------------

    def take_message(self, peer: WorkerRef, message: LiveMessage, loaded: int, now_ns: int) -> bool:
        """False if it is not for a target, or not for this one."""
        if isinstance(message, messages.Balance):
            self._mover.balance(peer, message)
            return True
        if isinstance(message, messages.Pull):
            self._answer(peer, message, loaded, now_ns)
            return True
        if isinstance(message, messages.Parted) and message.target in (self._instance, None):
            # It takes nothing any more: not what is on the way to it, either.
            self._mover.leave(peer)
            self.give_up(peer)
            return True
        if not isinstance(message, messages.AboutGiven):
            return False
        if isinstance(message, messages.KvWanted) and message.part is not None:
            self._batches.send_part(peer, message, message.part)
            return True
        if isinstance(message, messages.KvWanted) and self._decode_giver.early.want(peer, message):
            return True
        batch = self._batches.given.get(message.batch)
        if batch is None or batch.peer != peer:
            self._answer_late(peer, message)
        elif isinstance(message, messages.Declined):
            if not batch.is_taken:
                self._drainer.leave(peer)
                self._take_back(batch)
        elif isinstance(message, messages.Taken):
            batch.is_taken = True
            for sequence in batch.sequences:
                sequence.is_elsewhere = True
        elif isinstance(message, messages.KvWanted):
            if 1 <= message.layer < min(batch.next_layer, self._layers + 1):
                self._batches.tell(peer, messages.KvLayer(message.batch, message.layer))
        else:
            if batch.decoding:
                tokens = sum(tokens for _, tokens in batch.handed)
                self._drainer.settled(tokens, now_ns - batch.given_ns)
            self._batches.end(batch)
        return True

    def give_up(self, peer: WorkerRef, *, is_lost: bool = False) -> None:
        """It pulls nothing any more. What it was given and has not taken is the target's again, and
        is finished here; of what it took, a lost one wants nothing."""
        self._leave(peer)
        self._drainer.leave(peer)
        self._decode_giver.leave(peer)
        for batch in [batch for batch in self._batches.given.values() if batch.peer == peer]:
            if not batch.is_taken:
                self._take_back(batch)
            elif is_lost:
                self._batches.end(batch)

    def awaited(self) -> list[tuple[WorkerRef | None, InstanceId, int]]:
        """Whose answers are waited for, about batches of which instance, and since when."""
        given = self._batches.given.values()
        return [(b.peer, self._instance, b.given_ns) for b in given if not b.is_taken]

    # -- helpers, in the order used -------------------------------------------------------------

    def _leave(self, source: WorkerRef) -> None:
        """It does not pull any more."""
        if self._sources.pop(source, None) is not None:
            del self._offered[source]
            self._keep_declined()

    def _keep_declined(self) -> None:
        """What none of the sources wants stays."""
        for batch in self._batches.line:
            if self._sources and all(source in batch.declined for source in self._sources):
                batch.stays = True

    def _offer_to(self, source: WorkerRef, batches: list[LiveBatch]) -> None:
        instance = self._sources[source]
        offers = {batch.key: offer_of(batch.key, instance, batch.sequences) for batch in batches}
        known, self._offered[source] = self._offered[source], offers
        withdrawn = [messages.Offer(instance, key, (), ()) for key in known if key not in offers]
        changed = [offer for key, offer in offers.items() if offer != known.get(key)]
        for offer in withdrawn + changed:
            self._batches.tell(source, offer)

    def _answer(self, peer: WorkerRef, pull: messages.Pull, loaded: int, now_ns: int) -> None:
        """Hand over what was asked for, unless it is not to be had yet, or any more."""
        if self._decode_giver.promise(peer, pull):
            return
        batch = None
        if self._mover.offers(peer, pull.batch):
            batch = self._mover.take_out(peer)
        elif self._drainer.offers(peer, pull.batch):
            batch = self._drainer.take_out(peer)
        elif self._decode_giver.offers(peer, pull.batch):
            batch = self._decode_giver.take_out(peer, pull.batch)
        elif pull.batch.target == self._instance and peer in self._sources:
            batch = self._take_out(peer, pull, loaded)
        if batch is None:
            self._batches.tell(peer, messages.Gone(pull.batch))
            return
        # Unasked: a question would wait for the end of a Run here.
        self._hand_over(peer, batch, range(1, 1 + pull.kv_layers), loaded, now_ns)

    def _hand_over(
        self,
        peer: WorkerRef,
        batch: LiveBatch,
        kv_layers: Iterable[int],
        loaded: int,
        now_ns: int,
    ) -> None:
        self._batches.given[batch.key] = batch
        batch.hand()
        batch.peer, batch.given_ns = peer, now_ns
        self.handovers += 1
        following = next(iter(self.pullable(loaded)), None) if not batch.decoding else None
        following_done = following.layers_done if following is not None else 0
        # As another instance gets them: with what was generated here.
        specs = tuple(replace(s.as_spec(), moves=s.spec.moves + 1) for s in batch.sequences)
        cut, decoding = batch.next_layer, batch.decoding
        kv_at = batch.kv_at or _kv_at(batch)
        handover = messages.Handover(
            batch.key, specs, cut, decoding, following_done, kv_at, batch.shared
        )
        self._batches.tell(peer, handover)
        first = max((at.span.stop for at in kv_at), default=1)
        for layer in kv_layers if handover.needs_kv else ():
            if first <= layer < min(cut, self._layers + 1):
                self._batches.tell(peer, messages.KvLayer(batch.key, layer))

    def _take_out(self, peer: WorkerRef, pull: messages.Pull, loaded: int) -> LiveBatch | None:
        batch = self._batches.in_line(pull.batch)
        # What it was offered before is answered: it may be offered anew.
        self._offered[peer].pop(pull.batch, None)
        if batch is None or batch.stays or not self.pullable(loaded):
            return None
        self._batches.line.remove(batch)
        if pull.without_rows:
            batch.next_layer = 0
        for sequence in [s for s in batch.sequences if s.spec.request in batch.cancelled]:
            if batch.next_layer == 0:  # no row of it exists that would have to be left out
                batch.sequences.remove(sequence)
                del batch.cancelled[sequence.spec.request]
                self._held.drop(sequence)
        return batch

    def _answer_late(self, peer: WorkerRef, message: messages.AboutGiven) -> None:
        """The batch is none that was given to this one: it never was, or is over, or was taken
        back."""
        batch = self._batches.in_line(message.batch)
        if isinstance(message, messages.KvWanted):
            self._batches.tell(peer, messages.Gone(message.batch))
        elif isinstance(message, messages.Declined) and self._mover.offers(peer, message.batch):
            self._mover.leave(peer)
        elif isinstance(message, messages.Declined) and self._drainer.offers(peer, message.batch):
            self._drainer.leave(peer)
        elif isinstance(message, messages.Declined):
            self._declined_before(peer, message.batch, batch)
        elif batch is None:
            return
        elif isinstance(message, messages.Taken) and batch.peer == peer:
            # Later than the target would wait, but the requests are the source's now.
            self._batches.end(batch)

    def _declined_before(self, peer: WorkerRef, key: BatchKey, in_line: LiveBatch | None) -> None:
        """What the peer was offered, and has not pulled."""
        self._decode_giver.decline(peer, key)
        if in_line is not None and peer in self._sources:
            in_line.declined[peer] = None
            self._keep_declined()

    def _take_back(self, batch: LiveBatch) -> None:
        for sequence in batch.sequences:
            # The peer may have taken them, and tell so later: the next one has taken them after it.
            sequence.spec = replace(sequence.spec, moves=sequence.spec.moves + 1)
        if batch.decoding:
            if batch.peer is not None:
                self._decode_giver.taken_back(batch.peer, batch)
            self._batches.resume(batch)
            return
        del self._batches.given[batch.key]
        batch.stays = True
        self._batches.line.append(batch)
        self._batches.line.sort(key=lambda other: other.key)


def _kv_at(batch: LiveBatch) -> tuple[messages.KvAt, ...]:
    """Who else has KV of the request: the target of the batch that it was taken over with."""
    source = batch.lent_from
    if source is None or source.peer is None:
        return ()
    [sequence] = batch.sequences
    part = messages.PartOf(source.key, sequence.spec.request)
    return (messages.KvAt(source.peer, LayerSpan(1, source.kv_stop), part),)
