"""The target's side of a live pair: its line of batches, and those that it has given away.

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
    handed over and are not settled. Messages to the source pile up until `take_outbox`."""

    def __init__(
        self, batcher: Batcher, instance: InstanceId, layers: int, order: LiveOrder | None
    ) -> None:
        self._batcher = batcher
        self._instance = instance
        self._layers = layers
        self._order = order
        self.line: list[LiveBatch] = []
        self.given: dict[BatchKey, LiveBatch] = {}
        self._source: WorkerRef | None = None
        self._source_instance: InstanceId = 0
        self._batches = 0
        self._offered: Offer | None = None
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []
        #: batches handed over so far
        self.handovers = 0

    @property
    def is_parted(self) -> bool:
        """Nobody pulls from here (any more)."""
        return self._source is None

    def pair(self, source: WorkerRef, source_instance: InstanceId) -> None:
        """This one may pull."""
        self._source, self._source_instance = source, source_instance

    def part(self) -> None:
        """Nobody may pull any more."""
        if self._source is not None:
            self._say(Parted(self._instance))
            self._source = self._offered = None

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
                self._batcher.join(sequence)

    def forget(self, batch: LiveBatch) -> None:
        """Nothing is left of it."""
        if batch in self.line:
            self.line.remove(batch)
        self.given.pop(batch.key, None)

    def pullable(self, loaded: int) -> LiveBatch | None:
        """What the source may have next, once no Run is in flight. `loaded` decoder layers can run
        here."""
        assert self._order is not None
        line = [batch for batch in self.line if not batch.stays]
        progress = [batch.progress(False) for batch in line]
        index = self._order.source_pull(progress, loaded, self._layers)
        return line[index] if index is not None else None

    def offer(self, loaded: int, *, is_over: bool) -> tuple[WorkerRef, InstanceId] | None:
        """Tell the source what it can have next, if that has changed.

        `loaded` decoder layers can run here. `is_over`: no further batch will come. Returns the
        source if everything is done, and this one parts from it.
        """
        if self._source is None or self._order is None:
            return None
        if is_over and not self.line and not self.given:
            partner = self._source, self._source_instance
            self.part()
            return partner
        batch = self.pullable(loaded)
        offer = Offer(self._source_instance, BatchKey(self._instance, 0), (), ())
        if batch is not None:
            tokens = tuple(sequence.known_tokens for sequence in batch.sequences)
            tokens_max = tuple(sequence.tokens_max for sequence in batch.sequences)
            offer = Offer(self._source_instance, batch.key, tokens, tokens_max)
        if offer != self._offered:
            self._offered = offer
            self._say(offer)
        return None

    # -- the source's messages ------------------------------------------------------------------

    def take_message(self, peer: WorkerRef, message: LiveMessage, loaded: int, now_ns: int) -> bool:
        """False if it is not for a target, or not for this one."""
        if isinstance(message, Pull):
            if message.batch.target == self._instance and peer == self._source:
                self._answer(message.batch, loaded, now_ns)
            else:
                self._outbox.append((peer, Gone(message.batch)))
            return True
        if isinstance(message, Parted) and message.target == self._instance:
            if peer == self._source:
                self._source = self._offered = None
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
        if peer == self._source:
            self._source = self._offered = None
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
            if batch.given_to == self._source:
                self.part()

    def deadline_ns(self, answer_ns: int) -> int | None:
        """When the source is late."""
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

    def _say(self, message: LiveMessage) -> None:
        assert self._source is not None
        self._outbox.append((self._source, message))

    def _answer(self, key: BatchKey, loaded: int, now_ns: int) -> None:
        """Hand over what was asked for, unless it is not to be had any more."""
        batch = self._in_line(key)
        if batch is None or batch.stays or self.pullable(loaded) is None:
            self._offered = None  # the source may have taken no notice of the last offer
            self._say(Gone(key))
            return
        self.line.remove(batch)
        for sequence in [s for s in batch.sequences if s.spec.request in batch.cancelled]:
            if batch.next_layer == 0:  # no row of it exists that would have to be left out
                batch.sequences.remove(sequence)
                del batch.cancelled[sequence.spec.request]
                self._batcher.held.drop(sequence)
        self._offered = None
        assert self._source is not None
        self.hand_over(batch, self._source, now_ns)

    def hand_over(self, batch: LiveBatch, peer: WorkerRef, now_ns: int) -> None:
        """Give a batch of held requests away."""
        self.given[batch.key] = batch
        batch.hand()
        batch.given_to, batch.given_ns = peer, now_ns
        self.handovers += 1
        specs = tuple(map(_spec, batch.sequences))
        self._outbox.append((peer, Handover(batch.key, specs, batch.next_layer, batch.decoding)))

    def _answer_late(self, peer: WorkerRef, message: Declined | Taken | KvWanted | Settled) -> None:
        """The batch is none that was given to this one: it never was, or is over, or was taken
        back."""
        batch = self._in_line(message.batch)
        if isinstance(message, KvWanted):
            self._outbox.append((peer, Gone(message.batch)))
        elif batch is None:
            return
        elif isinstance(message, Declined) and peer == self._source:
            batch.stays = True
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
                    self._batcher.resume(sequence)
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
