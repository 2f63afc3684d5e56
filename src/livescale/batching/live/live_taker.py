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

from collections.abc import Callable, Sequence
from functools import partial

from livescale.batching.contract import live_messages as messages
from livescale.batching.contract.live_messages import LiveMessage, UnexpectedMessage
from livescale.batching.live.kv_ahead import KvAhead
from livescale.batching.live.kv_coming import KvComing
from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.live.live_batches import LiveBatches
from livescale.batching.live.live_pace import LivePace
from livescale.batching.live.live_pulls import PullUnderWay, PullWindow
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.held import Table, Tables
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import InstanceId, WorkerRef


class LiveTaker:
    """Takes batches over. `pace` says how long they should take here."""

    def __init__(
        self,
        batches: LiveBatches,
        limits: LiveLimits,
        pace: LivePace,
        decodes_elsewhere: Callable[[], bool],
    ) -> None:
        self._batcher = batches.batcher
        self._batches = batches
        self._instance = batches.instance
        self._limits = limits
        self._pace = pace
        self._decoder_layers = batches.batcher.span.stop - 2
        self.window = PullWindow(batches.batcher.room, limits.pulls_max)
        self.kv = KvComing(batches, limits, decodes_elsewhere)
        self.ahead = KvAhead(batches, self.window, partial(self.kv.layers_ahead, True))
        #: batches taken over so far
        self.handovers = 0
        #: what the last pulls took until their rows were here
        self._pull_ns = 0
        #: decoder layers that are done of the next batches, as far as is known
        self._following_done = 0
        #: of the batch that came last
        self._rank = 0
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
        self.kv.ask(now_ns)
        self.ahead.ask()
        self.window.is_held_up = self._waits_for_kv(now_ns)
        while (chosen := self.window.choose(self._is_calm(in_flight_ns))) is not None:
            peer, offer = chosen
            reservation = self._batcher.held.reserve(offer.tokens)
            without_rows = self.window.is_full and not offer.decoding
            kv_layers = 0
            is_wanted = offer.decoding or not self.kv.stays_away
            if self._limits.kv_follows and not without_rows and is_wanted:
                kv_layers = self.kv.layers_ahead(offer.decoding, offer.tokens)
            pull = PullUnderWay(peer, offer, reservation, now_ns, without_rows, in_flight_ns)
            pull.kv_asked = dict.fromkeys(range(1, 1 + kv_layers))
            self.window.begin(pull)
            self._batches.tell(peer, messages.Pull(offer.batch, without_rows, kv_layers))

    def _waits_for_kv(self, now_ns: int) -> bool:
        """Some batch has all layers run, and its requests wait for KV for longer than decodes wait
        for live work: the link brings KV of fewer batches than are finished here."""
        if not self._limits.kv_holds_pulls:
            return False
        for batch in self._batches.taken.values():
            is_computed = batch.next_layer == self._batcher.span.stop and batch.sequences
            if is_computed and not batch.decoding and self.kv.is_wanted(batch):
                batch.computed_ns = batch.computed_ns or now_ns
                if now_ns - batch.computed_ns > self._pace.left_ns(0):
                    return True
        return False

    def _is_calm(self, in_flight_ns: int) -> bool:
        """There is hardly anything else to prefill when a batch comes that is pulled now. One that
        is pulled at the beginning of a Run is lost to the target for as long: of a Run that is
        longer than the largest batch its end is waited for."""
        if not self._limits.pull_early_permille or in_flight_ns > self._pace.full_batch_ns:
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
        layers = self._decoder_layers
        token_layers = self._batcher.lines.queued_prefill_tokens * layers
        taken = self._batches.taken.values()
        token_layers += sum(b.tokens * max(layers - b.layers_done, 0) for b in taken)
        token_layers += self.window.token_layers(layers, self._following_done)
        if token_layers and not self._pace.token_layer_ps:
            return 1 << 62
        return token_layers * self._pace.token_layer_ps // 1000

    # -- the targets' messages ------------------------------------------------------------------

    def take_message(
        self,
        peer: WorkerRef,
        message: LiveMessage,
        now_ns: int,
        *,
        came_ns: int,
        is_full: bool,
        takes_decodes: bool = True,
    ) -> int | None:
        """`is_full`: all layers are here, so that this instance can help; `takes_decodes`: requests
        that decode would stay here. Returns how long the pull of a batch took that is taken over
        now, in ns."""
        if isinstance(message, messages.Handover):
            return self._handed(peer, message, now_ns)
        if isinstance(message, messages.Offer):
            _check_offer(message)
            if not is_full or message.source != self._instance:
                self._batches.tell(peer, messages.Parted(message.batch.target))
            elif message.decoding and (self.is_draining or not takes_decodes):
                # Not parted: what was pulled from there may be on its way.
                self._batches.tell(peer, messages.Declined(message.batch))
            else:
                self._offered(peer, message)
        elif isinstance(message, messages.Promised):
            self.ahead.promised(peer, message.batch)
        elif isinstance(message, messages.Gone):
            self._gone(peer, message.batch)
        elif isinstance(message, messages.KvLayer):
            pull = self.ahead.pull_of(peer, message)
            if pull is not None:
                pull.kv_came[message.layer] = came_ns
            elif self.wants_kv(peer, message):
                batch = self._batches.taken[message.batch]
                batch.kv_came[message.layer] = came_ns
                self.kv.came(batch, message.layer, now_ns)
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
            pull = self.ahead.pull_of(peer, message)
            if pull is not None:
                return sum(pull.kv_tokens)
            return sum(tokens for _, tokens in self._batches.taken[message.batch].handed)
        return None

    def wants_kv(self, peer: WorkerRef, message: messages.KvLayer) -> bool:
        """This layer's KV is missing here: it is to be written before `take_message`."""
        is_missing = self.kv.is_missing(peer, message)
        return is_missing or self.ahead.pull_of(peer, message) is not None

    def give_up(self, peer: WorkerRef) -> None:
        """What it did not send is not waited for any longer: those requests are computed anew."""
        self.window.drop_all(peer)
        self._decline([pull for pull in self.window.under_way.values() if pull.peer == peer])
        for batch in self.kv.lacking(peer):
            self._batches.end(batch, self._batcher.held.put_back)

    def awaited(self) -> list[tuple[WorkerRef | None, InstanceId, int]]:
        """Whose answers are waited for, about batches of which instance, and since when."""
        pulls = self.window.under_way.values()
        unanswered = [pull for pull in pulls if not pull.is_promised]
        waits = [(p.peer, p.offer.batch.target, p.asked_ns) for p in unanswered]
        return self.kv.awaited() + waits

    def forget_all(self) -> None:
        """The instance goes, and waits for no batch."""
        self._decline([*self.window.under_way.values()])
        for peer, key in self.window.targets():
            self.window.drop_all(peer)
            self._batches.tell(peer, messages.Parted(key.target))

    def take_shared(self, peer: WorkerRef, message: messages.Handover, table: Table) -> None:
        """A request of a team that ends, whose blocks are here: KV of the other members' layers is
        fetched from these."""
        assert message.shared is not None
        here = message.shared.span
        layers = range(1, 1 + self._decoder_layers)
        missing = [n for n in layers if not here.start <= n < here.stop]
        self._batches.tell(peer, messages.Taken(message.batch))
        self.handovers += 1
        [spec] = message.requests
        self.hold_shared(message.batch, spec, table, missing, message.kv_at, peer)

    def hold_shared(
        self,
        key: BatchKey,
        spec: SequenceSpec,
        table: Table,
        missing: Sequence[int],
        kv_at: tuple[messages.KvAt, ...],
        peer: WorkerRef | None = None,
    ) -> None:
        """The request decodes here when the KV of these layers has come: from holders, or from the
        peer that gave the request."""
        sequence = self._batcher.held.arrive(spec, table)
        batch = LiveBatch(key, [sequence], self._batcher.span.stop, decoding=True)
        batch.peer, batch.kv_at = peer, kv_at
        batch.hand()
        sequence.computed = sequence.prefill_tokens = sequence.known_tokens - 1
        sequence.is_started = True
        self._batches.taken[key] = batch
        self.kv.begin(batch, missing, ())
        if not missing:
            self._batches.settle(batch)
        self._batches.join_if_complete(batch)

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

    def _handed(self, peer: WorkerRef, message: messages.Handover, now_ns: int) -> int | None:
        pulled = self.window.end(peer, message.batch)
        if pulled is None or is_here_already(self._batcher, message):
            if pulled is not None:
                self._batcher.held.cancel_reserved(pulled.reservation)
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
        batch = LiveBatch(message.batch, _hold(self._batcher, message, tables), message.next_layer)
        batch.decoding, batch.peer = message.decoding, peer
        batch.asked_ns, batch.kv_came = pulled.asked_ns, pulled.kv_came
        batch.kv_at, batch.kv_stop = message.kv_at, message.next_layer
        # Of one that was promised the time since it was asked for says nothing of the link.
        batch.given_ns = 0 if pulled.is_promised else pulled.asked_ns
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
            missing = [n for n in self.kv.to_come(message) if n not in pulled.kv_came]
            self.kv.begin(batch, missing, [*pulled.kv_asked])
            batch.kv_since_ns = now_ns
        if not batch.kv_missing:
            self.kv.complete(batch)
        if batch.decoding:
            self._batches.join_if_complete(batch)
        return pull_ns

    def _gone(self, peer: WorkerRef, key: BatchKey) -> None:
        pulled = self.window.end(peer, key)
        if pulled is not None:
            self._batcher.held.cancel_reserved(pulled.reservation)
        for batch in [batch for batch in self.kv.lacking(peer) if batch.key == key]:
            if batch.peer == peer:
                batch.peer = None  # it does not keep anything of it
            self._batches.end(batch, self._batcher.held.put_back)


def is_here_already(batcher: Batcher, message: messages.Handover) -> bool:
    """An instance may be told late that an attempt which it gave was taken, and give the attempt to
    another one, too. Both hand it on, maybe to the same: that keeps what came first. Whose the
    request is, is for the gateway to say."""
    return any(spec.attempt in batcher.attempts(spec.request) for spec in message.requests)


def _hold(batcher: Batcher, message: messages.Handover, tables: Tables) -> list[SequenceState]:
    """Its requests, in the blocks that were reserved. Some may have left the batch since it was
    offered; of those that decode, each may have fewer tokens than were reserved for."""
    pool, free = batcher.pool, sorted(tables, key=len)
    counts = [pool.blocks_for(spec.known_tokens) for spec in message.requests]
    table_of = {}
    # The short ones first, each in the shortest table that will do: so all find one.
    for index in sorted(range(len(counts)), key=lambda index: counts[index]):
        table = next(table for table in free if len(table) >= counts[index])
        free.remove(table)
        table_of[index] = table[: counts[index]]
        pool.release(table[counts[index] :])
    for table in free:
        pool.release(table)
    return [batcher.held.arrive(s, table_of[i]) for i, s in enumerate(message.requests)]


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
    for spec in sorted(message.requests, key=lambda spec: spec.known_tokens):
        known = spec.known_tokens
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
    if message.kv_at and (len(message.requests) != 1 or not message.decoding):
        raise UnexpectedMessage("KV with several holders is that of one request that decodes")
    stop = 1
    for at in message.kv_at:
        if not stop <= at.span.start < at.span.stop <= layers + 1:
            raise UnexpectedMessage(f"KV of {at.span} of {layers} layers, from {stop} on")
        stop = at.span.stop
