"""A prefill instance: requests whose prompts it has computed decode elsewhere.

Prefill and decode on their own instances (BlitzScale §2.1). With its first token a request is held
here, KV of all layers with it, until a decode instance has pulled it: it is offered to all of them,
and the first Pull gets it. KV follows as when a request moves, or has gone ahead while the prompt
was computed (`early_offers.py`). While none has room the request waits with its KV, so that soon no
further prompt finds room here, and the router sends prompts elsewhere, or keeps them. Where there
is no decode instance requests decode here: none waits for an instance that may never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.batching.contract import live_messages as messages
from livescale.batching.live.early_offers import EarlyOffers
from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.live.live_batches import LiveBatches, offer_of
from livescale.batching.runs.run import BatchKey, Run
from livescale.batching.runs.sequence import SequenceState
from livescale.values.routes import Partner
from livescale.values.types import InstanceId, WorkerRef


@dataclass(slots=True)
class _Ready:
    """A request that can be pulled: the workers that were told so, and those that can never
    hold the request."""

    batch: LiveBatch
    told: dict[WorkerRef, None] = field(default_factory=dict)
    declined: dict[WorkerRef, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Promise:
    """A batch for a peer that has pulled it while its prompt was computed, and wants the KV of
    these layers, which was not sent."""

    peer: WorkerRef
    batch: LiveBatch
    kv_layers: tuple[int, ...]


class DecodeGiver:
    """Chooses what is offered to whom. The LiveGiver hands over what is pulled."""

    def __init__(self, batches: LiveBatches, limits: LiveLimits) -> None:
        self._batcher = batches.batcher
        self._batches = batches
        self._limits = limits
        #: requests whose prompts the Run in flight completes
        self.early = EarlyOffers(batches)
        #: the worker of each decode instance, and which instance (none: requests decode here)
        self._takers: dict[WorkerRef, InstanceId] = {}
        self._ready: dict[BatchKey, _Ready] = {}
        #: requests that decode here, because no decode instance can ever hold them, because what
        #: was told of their tokens is known here alone, or because they did when this was no giver
        self._staying: dict[int, None] = {}
        #: workers that were given a request, did not answer in time, and may have it all the same
        self._unsure: dict[int, dict[WorkerRef, None]] = {}

    @property
    def is_giving(self) -> bool:
        """Requests decode elsewhere."""
        return bool(self._takers)

    def decode_at(self, partners: Sequence[Partner], *, keeps: bool = False) -> None:
        """These may take requests from now on, and no others. None of them: requests decode here.
        With `keeps` those that decode here now end here."""
        before, self._takers = self._takers, {p.worker: p.instance for p in partners}
        for worker, instance in before.items():
            if self._takers.get(worker) != instance:
                self._withdraw(worker, instance)
        if keeps:
            own = self._batcher.lines.decoding()
            self._staying.update(dict.fromkeys(sequence.order for sequence in own))
        if not self._takers:
            self.early.drop_all(before)
            for ready in list(self._ready.values()):
                self._resume(ready)
            self._staying = {}

    def offers(self, peer: WorkerRef, key: BatchKey) -> bool:
        """The peer was offered the request of this batch, and may still have the batch."""
        ready = self._ready.get(key)
        return ready is not None and peer in ready.told and key in self._batches.ready

    def take_out(self, peer: WorkerRef, key: BatchKey) -> LiveBatch:
        """What the peer was offered is no longer to be had by others."""
        ready = self._ready.pop(key)
        del ready.told[peer]
        self._tell_gone(ready)
        return self._batches.ready.pop(key)

    def promise(self, peer: WorkerRef, pull: messages.Pull) -> bool:
        """The peer gets the request when its prompt is computed. False if it was not offered, or
        is computed."""
        return self.early.promise(peer, pull, self._takers)

    def decline(self, peer: WorkerRef, key: BatchKey) -> None:
        """The peer can never hold the request. If none can, the request decodes here."""
        if self.early.decline(peer, key):
            return
        ready = self._ready.get(key)
        if ready is None or peer not in ready.told:
            return
        del ready.told[peer]
        ready.declined[peer] = None
        if all(worker in ready.declined for worker in self._takers):
            self._keep(ready)

    def taken_back(self, peer: WorkerRef, batch: LiveBatch) -> None:
        """The peer was given the requests, and did not answer: they are not given there again."""
        for sequence in batch.sequences:
            self._unsure.setdefault(sequence.order, {})[peer] = None

    def leave(self, peer: WorkerRef) -> None:
        """The peer is to get nothing more."""
        if self._takers.pop(peer, None) is None:
            return
        self.early.leave(peer)
        for ready in self._ready.values():
            ready.told.pop(peer, None)
        if not self._takers:
            self.decode_at(())

    def forget_all(self) -> None:
        """The instance goes: what it holds was dropped."""
        self.early.drop_all(self._takers)
        for ready in self._ready.values():
            self._tell_gone(ready)
        self._ready, self._takers = {}, {}

    def announce(self, run: Run) -> None:
        """A Run of whole prompts, or of parts of them, has begun."""
        if not (self._takers and self._limits.kv_ahead):
            return
        running = self._batcher.lines.running
        ending = [running[segment.request] for segment in run.segments if segment.samples]
        prompts = [s for s in ending if self._may_leave(s) and s.known_tokens < s.tokens_max]
        self.early.announce(run, prompts, self._takers, self._unsure)

    def talk(self) -> list[Promise]:
        """Hold what has its first token, and offer what can be had. Between two Runs. Returns what
        is to be handed over: it was promised."""
        if not self._takers:
            return []
        promised: list[Promise] = []
        for key in [key for key in self._ready if key not in self._batches.ready]:
            self._tell_gone(self._ready.pop(key))
        decoding = self._batcher.lines.decoding()
        self._forget_others(decoding)
        for sequence in decoding:
            if sequence.order in self._staying:
                continue
            if not self._may_leave(sequence):
                self._staying[sequence.order] = None
                continue
            early = self.early.take(sequence)
            self._batcher.held.take_running(sequence)
            batch = self._batches.keep_ready(sequence, early.key if early is not None else None)
            if early is None:
                self._ready[batch.key] = _Ready(batch, declined=self._unsure_of(batch))
            elif early.peer is None:
                self._ready[batch.key] = _Ready(batch, early.told, early.declined)
            else:
                del self._batches.ready[batch.key]
                promised.append(Promise(early.peer, batch, tuple(early.wanted)))
        self.early.drop_all(self._takers)
        if self._limits.kv_straight:
            self._lend()
        for ready in list(self._ready.values()):
            if all(worker in ready.declined for worker in self._takers):
                self._keep(ready)
                continue
            for worker, instance in self._takers.items():
                if worker not in ready.told and worker not in ready.declined:
                    ready.told[worker] = None
                    batch = ready.batch
                    offer = offer_of(batch.key, instance, batch.sequences, decoding=True)
                    self._batches.tell(worker, offer)
        return promised

    # -- helpers, in the order used -------------------------------------------------------------

    def _lend(self) -> None:
        """Requests that were taken over, and have their first token, go without the KV that lies
        where they came from."""
        for batch in [*self._batches.taken.values()]:
            if batch.decoding or not batch.kv_missing or batch.peer is None:
                continue
            if batch.next_layer < self._batcher.span.stop:
                continue
            for sequence in [*batch.sequences]:
                if not self._may_leave(sequence):
                    self._staying[sequence.order] = None
                    batch.keeps_kv = True
                    continue
                lent = self._batches.lend(batch, sequence)
                self._ready[lent.key] = _Ready(lent, declined=self._unsure_of(lent))

    def _may_leave(self, sequence: SequenceState) -> bool:
        """It decodes elsewhere, if it decodes."""
        # Where it goes tokens are told again, but of their logprobs nothing is known.
        has_logprobs = sequence.spec.sampling.logprobs is not None
        return sequence.order not in self._staying and not has_logprobs

    def _withdraw(self, worker: WorkerRef, instance: InstanceId) -> None:
        self.early.withdraw_from(worker, instance)
        for key, ready in self._ready.items():
            if worker not in self._unsure_of(ready.batch):
                ready.declined.pop(worker, None)
            if worker in ready.told:
                del ready.told[worker]
                self._batches.tell(worker, messages.Offer(instance, key, (), ()))

    def _unsure_of(self, batch: LiveBatch) -> dict[WorkerRef, None]:
        """Workers that the request is not given to: also the one that has KV of it as part of a
        batch, and cannot ask itself."""
        unsure = {w: None for s in batch.sequences for w in self._unsure.get(s.order, ())}
        source = batch.lent_from
        return unsure if source is None or source.peer is None else {**unsure, source.peer: None}

    def _forget_others(self, decoding: Sequence[SequenceState]) -> None:
        """What is kept of requests that are neither among these, nor held, nor on their way."""
        own = self._batches
        batches = (*own.ready.values(), *own.given.values(), *own.taken.values())
        held = [sequence for batch in batches for sequence in batch.sequences]
        orders = [sequence.order for sequence in (*decoding, *held)]
        self._staying = {order: None for order in orders if order in self._staying}
        self._unsure = {o: self._unsure[o] for o in orders if o in self._unsure}

    def _keep(self, ready: _Ready) -> None:
        """None of the decode instances can have the request: it decodes here, to its end."""
        for sequence in ready.batch.sequences:
            self._staying[sequence.order] = None
        self._resume(ready)

    def _tell_gone(self, ready: _Ready) -> None:
        """The request is no longer to be had."""
        self._batches.tell_gone(ready.batch.key, ready.told, self._takers)
        ready.told = {}

    def _resume(self, ready: _Ready) -> None:
        """The request decodes here."""
        self._tell_gone(self._ready.pop(ready.batch.key))
        self._batches.resume(ready.batch)
