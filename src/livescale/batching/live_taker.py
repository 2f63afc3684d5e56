"""The source's side of live pairs: what targets offer, what was pulled and is finished here.

A source pulls when it has no prompt of its own to compute and KV blocks for all layers of the batch
(they are reserved before it asks). Rows come first: the first token needs nothing else. KV follows
layer by layer, while the remaining layers run: of the first layers unasked, of others as asked for.
A request decodes when all of its KV is here. No Runs are chosen here: that is the LiveBatcher's.

Several pulls may be under way, so that the rows of the next batches are here when the last one is
computed. Where links bring fewer batches than this instance could finish, it takes the last ones in
line without their rows, and computes them from their prompts while it would wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching import live_messages as messages
from livescale.batching.batcher import Batcher
from livescale.batching.held import Tables
from livescale.batching.live_batch import LiveBatch, LiveLimits
from livescale.batching.live_batches import LiveBatches
from livescale.batching.live_messages import LiveMessage, UnexpectedMessage
from livescale.batching.live_pace import LivePace
from livescale.batching.live_pulls import PullUnderWay, PullWindow
from livescale.batching.run import BatchKey
from livescale.batching.sequence import SequenceState
from livescale.routes import kv_moves
from livescale.types import InstanceId, LayerSpan, WorkerRef


class LiveTaker:
    """Takes batches over. `pace` says how long they should take here."""

    def __init__(self, batches: LiveBatches, limits: LiveLimits, pace: LivePace) -> None:
        self._batcher = batches.batcher
        self._batches = batches
        self._instance = batches.instance
        self._limits = limits
        self._pace = pace
        self.window = PullWindow(batches.batcher.room, limits.pulls_max)
        #: batches taken over so far
        self.handovers = 0
        #: what the last pulls took until their rows were here
        self._pull_ns = 0
        #: decoder layers that are done of the next batches, as far as is known
        self._following_done = 0
        #: of the batch that came last
        self._rank = 0
        #: what the KV of the last requests that were moved here took per token (0: none was)
        self.kv_token_ps = 0
        #: requests that decode elsewhere are not to come here
        self.is_draining = False

    @property
    def is_idle(self) -> bool:
        """Nothing is offered, asked for or missing."""
        return self.window.is_idle and not self._batches.taken

    def runnable(self) -> list[LiveBatch]:
        """Batches that have layers left, the first taken first: but those without rows after the
        ones that were before them in line."""
        stop = self._batcher.span.stop
        batches = [batch for batch in self._batches.taken.values() if batch.chosen_layer < stop]
        return sorted(batches, key=lambda batch: batch.rank)

    # -- pulling --------------------------------------------------------------------------------

    def pull(self, now_ns: int, in_flight_ns: int) -> None:
        """Ask for the next batches, if this instance will have nothing else to prefill when they
        come, and has room for them; ask for KV that is missing. Nothing can be asked for while the
        Runs in flight do their prefill work, which takes `in_flight_ns`."""
        for batch in self._batches.taken.values():
            if batch.peer is not None:
                self._ask_kv(batch, batch.peer, now_ns)
        self.window.is_held_up = self._waits_for_kv(now_ns)
        while (chosen := self.window.choose(self._is_calm(in_flight_ns))) is not None:
            peer, offer = chosen
            reservation = self._batcher.held.reserve(offer.tokens)
            without_rows = self.window.is_full and not offer.decoding
            kv_layers = 0
            if self._limits.kv_follows and not without_rows:
                kv_layers = self._kv_layers_ahead(offer.decoding, offer.tokens)
            self.window.begin(
                PullUnderWay(
                    peer, offer, reservation, now_ns, without_rows, in_flight_ns, kv_layers
                )
            )
            self._batches.tell(peer, messages.Pull(offer.batch, without_rows, kv_layers))

    def _waits_for_kv(self, now_ns: int) -> bool:
        """Some batch has all layers run, and its requests wait for KV for longer than decodes wait
        for live work: the link brings KV of fewer batches than are finished here."""
        if not self._limits.kv_holds_pulls:
            return False
        for batch in self._batches.taken.values():
            if batch.next_layer == self._batcher.span.stop and not batch.decoding:
                batch.computed_ns = batch.computed_ns or now_ns
                if now_ns - batch.computed_ns > self._pace.left_ns(0):
                    return True
        return False

    def _is_calm(self, in_flight_ns: int) -> bool:
        """There is hardly anything else to prefill when a batch comes that is pulled now."""
        if not self._limits.pull_early_permille:
            in_flight_ns = 0
        return self._ahead_ns() - in_flight_ns <= self._early_ns()

    def calm_ns(self) -> int:
        """For so long nothing is to be pulled."""
        return 1 << 62 if self.window.is_full else self._ahead_ns() - self._early_ns()

    def _early_ns(self) -> int:
        """So much prefill work is to be left when the next batch is asked for."""
        part_ns = self._pace.full_batch_ns * self._limits.pull_early_permille // 1000
        return max(self._pull_ns, part_ns)

    def _ahead_ns(self) -> int:
        """Prefill work that is here or on its way. Of unknown length, if nothing was measured."""
        layers = self._batcher.span.stop - 2
        token_layers = self._batcher.lines.queued_prefill_tokens * layers
        taken = self._batches.taken.values()
        token_layers += sum(b.tokens * max(layers - b.layers_done, 0) for b in taken)
        token_layers += self.window.token_layers(layers, self._following_done)
        if token_layers and not self._pace.token_layer_ps:
            return 1 << 62
        return token_layers * self._pace.token_layer_ps // 1000

    # -- the targets' messages ------------------------------------------------------------------

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, *, is_full: bool
    ) -> int | None:
        """`is_full`: all layers are here, so that this instance can help. Returns how long the pull
        of a batch took that is taken over now, in ns."""
        if isinstance(message, messages.Handover):
            return self._handed(peer, message, now_ns)
        if isinstance(message, messages.Offer):
            _check_offer(message)
            is_wanted = is_full and not (message.decoding and self.is_draining)
            if message.source == self._instance and is_wanted:
                self._offered(peer, message)
            else:
                self._batches.tell(peer, messages.Parted(message.batch.target))
        elif isinstance(message, messages.Gone):
            self._gone(peer, message.batch)
        elif isinstance(message, messages.KvLayer):
            if self.wants_kv(peer, message):
                self._take_kv(self._batches.taken[message.batch], message.layer, now_ns)
        elif isinstance(message, messages.Parted):
            self.window.drop_all(peer)
        return None

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """As told of a Serving. What is checked here does not depend on how a message came."""
        if isinstance(message, messages.Handover):
            pull = self.window.under_way.get(message.batch)
            if pull is None or pull.peer != peer:
                return None
            _check_handover(self._batcher, message, pull.offer.tokens)
            return message.rows
        if isinstance(message, messages.KvLayer) and self.wants_kv(peer, message):
            return sum(tokens for _, tokens in self._batches.taken[message.batch].handed)
        return None

    def wants_kv(self, peer: WorkerRef, message: messages.KvLayer) -> bool:
        """This layer's KV is missing here: it is to be written before `take_message`."""
        batch = self._batches.taken.get(message.batch)
        return batch is not None and batch.peer == peer and message.layer in batch.kv_missing

    def give_up(self, peer: WorkerRef) -> None:
        """What it did not send is not waited for any longer: those requests are computed anew."""
        self.window.drop_all(peer)
        self._decline([pull for pull in self.window.under_way.values() if pull.peer == peer])
        for batch in [batch for batch in self._batches.taken.values() if batch.peer == peer]:
            self._batches.end(batch, self._batcher.held.put_back)

    def awaited(self) -> list[tuple[WorkerRef | None, InstanceId, int]]:
        """Whose answers are waited for, about batches of which instance, and since when."""
        pulls, taken = self.window.under_way.values(), self._batches.taken.values()
        waits = [(b.peer, b.key.target, b.kv_since_ns) for b in taken if b.kv_asked]
        return waits + [(pull.peer, pull.offer.batch.target, pull.asked_ns) for pull in pulls]

    def forget_all(self) -> None:
        """The instance goes, and waits for no batch."""
        self._decline([*self.window.under_way.values()])
        for peer, key in self.window.targets():
            self.window.drop_all(peer)
            self._batches.tell(peer, messages.Parted(key.target))

    # -- helpers, in the order used -------------------------------------------------------------

    def _decline(self, pulls: Sequence[PullUnderWay]) -> None:
        for pull in pulls:
            self.window.end(pull.peer, pull.offer.batch)
            self._batcher.held.cancel_reserved(pull.reservation)
            self._batches.tell(pull.peer, messages.Declined(pull.offer.batch))

    def _offered(self, peer: WorkerRef, offer: messages.Offer) -> None:
        self.window.drop(peer, offer.batch)
        is_known = offer.batch in self._batches.taken or offer.batch in self.window.under_way
        if is_known or not offer.tokens:
            return  # sent before it was handed over: a second pull would be of nothing
        if not self._batcher.room.fits_alone(offer.needs):
            self._batches.tell(peer, messages.Declined(offer.batch))
        else:
            self.window.keep(peer, offer)

    def _ask_kv(self, batch: LiveBatch, peer: WorkerRef, now_ns: int) -> None:
        if not batch.kv_asked:
            batch.kv_since_ns = now_ns
        ahead = self._kv_layers_ahead(batch.decoding, [tokens for _, tokens in batch.handed])
        for layer in batch.kv_missing:
            if len(batch.kv_asked) >= ahead:
                return
            if layer not in batch.kv_asked:
                batch.kv_asked[layer] = None
                self._batches.tell(peer, messages.KvWanted(batch.key, layer))

    def _kv_layers_ahead(self, decoding: bool, tokens: Sequence[int]) -> int:
        """KV of so many layers of these requests may be on its way at once."""
        layers = self._batcher.span.stop - 2
        ahead = self._limits.kv_layers_ahead
        if decoding:  # they pause meanwhile: as few rounds as memory allows
            ahead = max(ahead, self._limits.batch_tokens_max * layers // sum(tokens))
        return min(ahead, layers)

    def _take_kv(self, batch: LiveBatch, layer: int, now_ns: int) -> None:
        del batch.kv_missing[layer]
        batch.kv_asked.pop(layer, None)
        batch.kv_since_ns = now_ns
        if not batch.kv_missing:
            self._batches.settle(batch)
            if batch.decoding:
                tokens = sum(tokens for _, tokens in batch.handed)
                self.kv_token_ps = max(1, (now_ns - batch.given_ns) * 1000 // tokens)
        self._batches.join_if_complete(batch)

    def _handed(self, peer: WorkerRef, message: messages.Handover, now_ns: int) -> int | None:
        pulled = self.window.end(peer, message.batch)
        if pulled is None:
            self._batches.tell(peer, messages.Declined(message.batch))
            return None
        tables = self._batcher.held.take_reserved(pulled.reservation)
        pull_ns = now_ns - pulled.asked_ns
        # What waited for the end of a Run here says nothing. A pull that comes late leaves this
        # instance idle: the slow ones count more.
        has_waited = 0 < pulled.in_flight_ns <= pull_ns and self._limits.pull_early_permille
        if not message.decoding and not has_waited:
            self._pull_ns = max(pull_ns, (3 * self._pull_ns + pull_ns) // 4)
        self._batches.tell(peer, messages.Taken(message.batch))
        self.handovers += 1
        batch = LiveBatch(message.batch, self._hold(message, tables), message.next_layer)
        batch.decoding, batch.peer, batch.given_ns = message.decoding, peer, pulled.asked_ns
        batch.hand()
        for sequence, tokens in batch.handed if batch.decoding else ():
            sequence.computed = sequence.prefill_tokens = tokens
            sequence.is_started = True  # where it was before
        for spec in message.requests:
            if max(self._batcher.attempts(spec.request)) > spec.attempt:
                batch.cancelled[spec.request] = None
        self._rank += 1
        batch.rank = self._rank
        # Of those to come about as much will be done as of this one.
        if not message.decoding:
            self._following_done = max(message.following_done, batch.layers_done - 1)
        if pulled.without_rows:
            batch.rank += len(self.window.under_way) + self.window.offered_by(peer)
        self._batches.taken[batch.key] = batch
        if (message.next_layer == 0 and not pulled.without_rows) or batch.is_over:
            # Nothing was done of it: it is a prompt like any other, and may find its beginning.
            self._batches.end(batch, self._batcher.held.put_back)
        elif message.needs_kv:
            batch.kv_missing = self._kv_to_come(message)
            batch.kv_asked = {n: None for n in batch.kv_missing if n <= pulled.kv_layers}
            batch.kv_since_ns = now_ns
        if not batch.kv_missing:
            self._batches.settle(batch)
        return pull_ns

    def _kv_to_come(self, message: messages.Handover) -> dict[int, None]:
        """Layers whose KV the target wrote and decodes need here, where the whole batch goes on."""
        decoders = LayerSpan(1, self._batcher.span.stop - 1)
        if message.next_layer <= 1:
            return {}
        done = [(message.batch.target, LayerSpan(1, message.next_layer))]
        moves = kv_moves(done, [(self._instance, decoders)])
        return {layer: None for m in moves for layer in range(m.span.start, m.span.stop)}

    def _hold(self, message: messages.Handover, tables: Tables) -> list[SequenceState]:
        """Its requests, in the blocks that were reserved. Some may have left the batch since it was
        offered; of those that decode, each may have fewer tokens than were reserved for."""
        pool, free = self._batcher.pool, sorted(tables, key=len)
        counts = [
            pool.blocks_for(len(s.prompt_ids) + len(s.generated_ids)) for s in message.requests
        ]
        table_of = {}
        # The short ones first, each in the shortest table that will do: so all find one.
        for index in sorted(range(len(counts)), key=lambda index: counts[index]):
            table = next(table for table in free if len(table) >= counts[index])
            free.remove(table)
            table_of[index] = table[: counts[index]]
            pool.release(table[counts[index] :])
        for table in free:
            pool.release(table)
        return [self._batcher.held.arrive(s, table_of[i]) for i, s in enumerate(message.requests)]

    def _gone(self, peer: WorkerRef, key: BatchKey) -> None:
        pulled = self.window.end(peer, key)
        if pulled is not None:
            self._batcher.held.cancel_reserved(pulled.reservation)
        batch = self._batches.taken.get(key)
        if batch is not None and batch.peer == peer:
            batch.peer = None  # it does not keep anything of it
            self._batches.end(batch, self._batcher.held.put_back)


def _check_offer(message: messages.Offer) -> None:
    """Raises UnexpectedMessage for sizes that no requests have."""
    known, most = message.tokens, message.tokens_max
    if len(known) != len(most) or not all(0 < k <= m for k, m in zip(known, most, strict=True)):
        raise UnexpectedMessage(f"an offer of {known} tokens, at most {most}")


def _check_handover(batcher: Batcher, message: messages.Handover, pulled: tuple[int, ...]) -> None:
    """The batch is the one that was offered (some may have been cancelled), and can run here.
    `pulled` are the known tokens of the requests that were offered. Raises UnexpectedMessage."""
    layers, offered = batcher.span.stop - 2, sorted(pulled)
    done = [batcher.span.stop] if message.decoding else [0, *range(2, layers + 1)]
    if message.next_layer not in done:
        raise UnexpectedMessage(f"a batch that is at layer {message.next_layer} of {layers}")
    if not 0 <= message.following_done <= layers:
        raise UnexpectedMessage(f"a next batch with {message.following_done} layers of {layers}")
    if len({spec.request for spec in message.requests}) < len(message.requests):
        raise UnexpectedMessage("a request is in the batch twice")
    for spec in sorted(message.requests, key=lambda s: len(s.prompt_ids) + len(s.generated_ids)):
        known = len(spec.prompt_ids) + len(spec.generated_ids)
        fitting = [n for n in offered if n == known or (message.decoding and n > known)]
        if not fitting:
            raise UnexpectedMessage(f"{spec.request} has {known} tokens: not offered")
        offered.remove(fitting[0])
        if message.decoding and not spec.generated_ids:
            raise UnexpectedMessage(f"{spec.request} does not decode")
        if not spec.prompt_ids:
            raise UnexpectedMessage(f"{spec.request} has no prompt")
        most = len(spec.prompt_ids) + spec.sampling.output_tokens_max - 1
        if not known <= most <= batcher.tokens_held_max():
            raise UnexpectedMessage(f"{spec.request} needs KV for {most} tokens")
        if spec.attempt in batcher.attempts(spec.request):
            raise UnexpectedMessage(f"attempt {spec.attempt} at {spec.request} is here already")
