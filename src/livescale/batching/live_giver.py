"""The target's side of live pairs: its line of batches, and those that it has given away.

No Runs are chosen here: that is the LiveBatcher's.
"""

from __future__ import annotations

from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveBatch
from livescale.batching.live_messages import (
    BatchKey,
    Declined,
    Gone,
    Handover,
    KvLayer,
    KvWanted,
    LiveMessage,
    Offer,
    Parted,
    Pull,
    Settled,
    Taken,
)
from livescale.batching.live_order import LiveOrder
from livescale.batching.run import SequenceSpec
from livescale.batching.sequence import SequenceState
from livescale.types import InstanceId, WorkerRef


class LiveGiver:
    """`line` are the batches that are the target's, the earliest first; `given` those that were
    handed over and are not settled. Messages to the sources pile up until `take_outbox`."""

    def __init__(
        self, batcher: Batcher, instance: InstanceId, layers: int, order: LiveOrder | None
    ) -> None:
        self._batcher = batcher
        self._instance = instance
        self._layers = layers
        self._order = order
        self.line: list[LiveBatch] = []
        self.given: dict[BatchKey, LiveBatch] = {}
        #: instances that may pull, and what each was offered
        self._sources: dict[WorkerRef, InstanceId] = {}
        self._offered: dict[WorkerRef, dict[BatchKey, Offer]] = {}
        self._batches = 0
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []
        #: batches handed over so far
        self.handovers = 0

    @property
    def is_parted(self) -> bool:
        """No source pulls from here (any more)."""
        return not self._sources

    def pair(self, source: WorkerRef, source_instance: InstanceId) -> None:
        """This one may pull, too."""
        self._sources[source] = source_instance
        self._offered[source] = {}

    def part(self) -> None:
        """No source may pull any more."""
        for source in sorted(self._sources):
            self._outbox.append((source, Parted(self._instance)))
            self._leave(source)

    # -- the line -------------------------------------------------------------------------------

    def append(self, sequences: list[SequenceState]) -> None:
        """Held requests are a batch from now on, the last of the line."""
        self.line.append(LiveBatch(self.next_key(), sequences))

    def next_key(self) -> BatchKey:
        """Names the next batch that leaves or may leave this instance."""
        self._batches += 1
        return BatchKey(self._instance, self._batches)

    def computed(self, batch: LiveBatch) -> None:
        """Its last layer was run here: what is not over joins the running requests."""
        if batch in self.line:
            self.line.remove(batch)
            for sequence in batch.sequences:
                self._batcher.held.join(sequence)

    def forget(self, batch: LiveBatch) -> None:
        """Nothing is left of it."""
        if batch in self.line:
            self.line.remove(batch)
        self.given.pop(batch.key, None)

    def pullable(self, loaded: int) -> list[LiveBatch]:
        """What sources may have, in this order, once no Run is in flight. `loaded` decoder layers
        can run here."""
        assert self._order is not None
        line = [batch for batch in self.line if not batch.stays]
        progress = [batch.progress(False) for batch in line]
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
        if is_over and not self.line and not self.given:
            partners = sorted(self._sources.items())
            self.part()
            return partners
        batches = self.pullable(loaded)
        for source in sorted(self._sources):
            self._offer_to(source, [batch for batch in batches if source not in batch.declined])
        return []

    # -- the source's messages ------------------------------------------------------------------

    def take_message(self, peer: WorkerRef, message: LiveMessage, loaded: int, now_ns: int) -> bool:
        """False if it is not for a target, or not for this one."""
        if isinstance(message, Pull):
            if message.batch.target == self._instance and peer in self._sources:
                self._answer(peer, message, loaded, now_ns)
            else:
                self._outbox.append((peer, Gone(message.batch)))
            return True
        if isinstance(message, Parted) and message.target == self._instance:
            self._leave(peer)
            # It takes nothing any more: not what is on the way to it, either.
            for unanswered in self._unanswered():
                if unanswered.given_to == peer:
                    self._take_back(unanswered)
            return True
        if not isinstance(message, Declined | Taken | KvWanted | Settled):
            return False
        batch = self.given.get(message.batch)
        if batch is None or batch.given_to != peer:
            self._answer_late(peer, message)
        elif isinstance(message, Declined):
            if not batch.is_taken:
                self._take_back(batch)
        elif isinstance(message, Taken):
            batch.is_taken = True
            for sequence in batch.sequences:
                sequence.is_elsewhere = True
        elif isinstance(message, KvWanted):
            if 1 <= message.layer < min(batch.next_layer, self._layers + 1):
                self._outbox.append((peer, KvLayer(message.batch, message.layer)))
        else:
            self._settle(batch)
        return True

    def peer_lost(self, peer: WorkerRef) -> None:
        """What was not taken is the target's again, and it finishes it."""
        self._leave(peer)
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]
        for batch in [batch for batch in self.given.values() if batch.given_to == peer]:
            if batch.is_taken:
                self._settle(batch)
            else:
                self._take_back(batch)

    def take_outbox(self) -> list[tuple[WorkerRef, LiveMessage]]:
        outbox, self._outbox = self._outbox, []
        return [(peer, self._if_given(message)) for peer, message in outbox]

    def expire(self, now_ns: int, answer_ns: int) -> None:
        """A source that says nothing of what it was given gets nothing more."""
        late = [batch for batch in self._unanswered() if now_ns > batch.given_ns + answer_ns]
        for batch in late:
            self._take_back(batch)
            if batch.given_to in self._sources:
                self._outbox.append((batch.given_to, Parted(self._instance)))
                self._leave(batch.given_to)

    def deadline_ns(self, answer_ns: int) -> int | None:
        """When a source is late."""
        given_ns = min((batch.given_ns for batch in self._unanswered()), default=None)
        return given_ns + answer_ns + 1 if given_ns is not None else None

    # -- helpers, in the order used -------------------------------------------------------------

    def _if_given(self, message: LiveMessage) -> LiveMessage:
        """What is over since it was promised is not to be had."""
        if isinstance(message, Handover | KvLayer) and message.batch not in self.given:
            return Gone(message.batch)
        return message

    def _unanswered(self) -> list[LiveBatch]:
        """Batches that were handed over and of which nothing was heard."""
        return [batch for batch in self.given.values() if not batch.is_taken]

    def _leave(self, source: WorkerRef) -> None:
        """It does not pull any more."""
        if self._sources.pop(source, None) is not None:
            del self._offered[source]
            self._keep_declined()

    def _keep_declined(self) -> None:
        """What none of the sources wants stays."""
        for batch in self.line:
            if self._sources and all(source in batch.declined for source in self._sources):
                batch.stays = True

    def _offer_to(self, source: WorkerRef, batches: list[LiveBatch]) -> None:
        offers = {}
        for batch in batches:
            tokens = tuple(sequence.known_tokens for sequence in batch.sequences)
            tokens_max = tuple(sequence.tokens_max for sequence in batch.sequences)
            offers[batch.key] = Offer(self._sources[source], batch.key, tokens, tokens_max)
        known, self._offered[source] = self._offered[source], offers
        withdrawn = [
            Offer(self._sources[source], key, (), ()) for key in known if key not in offers
        ]
        changed = [offer for key, offer in offers.items() if offer != known.get(key)]
        self._outbox += [(source, offer) for offer in withdrawn + changed]

    def _answer(self, peer: WorkerRef, pull: Pull, loaded: int, now_ns: int) -> None:
        """Hand over what was asked for, unless it is not to be had any more."""
        batch = self._in_line(pull.batch)
        # What it was offered before is answered: it may be offered anew.
        self._offered[peer].pop(pull.batch, None)
        if batch is None or batch.stays or not self.pullable(loaded):
            self._outbox.append((peer, Gone(pull.batch)))
            return
        self.line.remove(batch)
        if pull.without_rows:
            batch.next_layer = 0
        for sequence in [s for s in batch.sequences if s.spec.request in batch.cancelled]:
            if batch.next_layer == 0:  # no row of it exists that would have to be left out
                batch.sequences.remove(sequence)
                del batch.cancelled[sequence.spec.request]
                self._batcher.held.drop(sequence)
        following = next(iter(self.pullable(loaded)), None)
        following_done = following.layers_done if following is not None else 0
        self.hand_over(batch, peer, now_ns, following_done)

    def hand_over(
        self, batch: LiveBatch, peer: WorkerRef, now_ns: int, following_done: int = 0
    ) -> None:
        """Give a batch of held requests away."""
        self.given[batch.key] = batch
        batch.hand()
        batch.given_to, batch.given_ns = peer, now_ns
        self.handovers += 1
        specs = tuple(map(_spec, batch.sequences))
        handover = Handover(batch.key, specs, batch.next_layer, batch.decoding, following_done)
        self._outbox.append((peer, handover))

    def _answer_late(self, peer: WorkerRef, message: Declined | Taken | KvWanted | Settled) -> None:
        """The batch is none that was given to this one: it never was, or is over, or was taken
        back."""
        batch = self._in_line(message.batch)
        if isinstance(message, KvWanted):
            self._outbox.append((peer, Gone(message.batch)))
        elif batch is None:
            return
        elif isinstance(message, Declined) and peer in self._sources:
            batch.declined[peer] = None
            self._keep_declined()
        elif isinstance(message, Taken) and batch.given_to == peer:
            # Later than the target would wait, but the requests are the source's now.
            self.line.remove(batch)
            self._free(batch)

    def _in_line(self, key: BatchKey) -> LiveBatch | None:
        return next((batch for batch in self.line if batch.key == key), None)

    def _take_back(self, batch: LiveBatch) -> None:
        del self.given[batch.key]
        if batch.decoding:
            for sequence in batch.sequences:
                if sequence.spec.request in batch.cancelled:
                    self._batcher.held.drop(sequence)
                else:
                    self._batcher.held.resume(sequence)
            batch.sequences = []
            return
        batch.stays = True
        self.line.append(batch)
        self.line.sort(key=lambda other: other.key)

    def _settle(self, batch: LiveBatch) -> None:
        del self.given[batch.key]
        self._free(batch)

    def _free(self, batch: LiveBatch) -> None:
        for sequence in batch.sequences:
            self._batcher.held.drop(sequence)
        batch.sequences = []


def _spec(sequence: SequenceState) -> SequenceSpec:
    """The request as another instance gets it: with what was generated here."""
    spec = sequence.spec
    return SequenceSpec(
        request=spec.request,
        attempt=spec.attempt,
        prompt_ids=spec.prompt_ids,
        sampling=spec.sampling,
        generated_ids=tuple(sequence.generated),
        cache_salt=spec.cache_salt,
        content=spec.content,
        moves=spec.moves + 1,
    )
