"""A prefill instance: KV goes to decode instances while prompts are still computed.

A request whose prompt the Run in flight completes is offered already. The decode instance that
pulls first has reserved its blocks, and the request is promised: KV of each layer goes when that
layer is done, and the request follows with its first token (BlitzScale §5.1: KV travels layer by
layer). So the first decode waits for the KV of the last layer only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from livescale.batching.contract import live_messages as messages
from livescale.batching.live.live_batch import EarlyOffer
from livescale.batching.live.live_batches import LiveBatches, offer_of
from livescale.batching.runs.run import BatchKey, Run
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import InstanceId, WorkerRef


class EarlyOffers:
    """Those of the Run in flight. They end with it: the DecodeGiver takes them."""

    def __init__(self, batches: LiveBatches) -> None:
        self._batches = batches
        self._offers = batches.early
        self._layers = batches.batcher.span.stop - 2
        #: layers below are done of the Run in flight
        self._layers_stop = 0

    @property
    def is_empty(self) -> bool:
        """Nothing is to be sent while the Run in flight goes on."""
        return not self._offers

    def announce(
        self,
        run: Run,
        sequences: Iterable[SequenceState],
        takers: Mapping[WorkerRef, InstanceId],
        unsure: Mapping[int, Mapping[WorkerRef, None]],
    ) -> None:
        """The Run has begun, and completes the prompts of these requests: offer them, but to
        workers that may have them already (`unsure`, by order of the request)."""
        self._layers_stop = run.span.start
        for sequence in sequences:
            offer = EarlyOffer(self._batches.next_key(), sequence, sequence.known_tokens)
            offer.declined = dict(unsure.get(sequence.order, ()))
            self._offers[offer.key] = offer
            for worker, instance in takers.items():
                if worker not in offer.declined:
                    offer.told[worker] = None
                    # As it will be when it is handed over: with its first token.
                    told = offer_of(offer.key, instance, [sequence], 1, decoding=True)
                    self._batches.tell(worker, told)

    def layers_ran(self, stop: int) -> None:
        """The Run in flight has done the layers below."""
        self._layers_stop = stop
        for offer in self._offers.values():
            self._send(offer)

    # -- the takers' messages -------------------------------------------------------------------

    def promise(
        self, peer: WorkerRef, pull: messages.Pull, takers: Mapping[WorkerRef, InstanceId]
    ) -> bool:
        """The peer pulls what it was offered: no other one gets it. False if it was not."""
        offer = self._offers.get(pull.batch)
        if offer is None or peer not in offer.told:
            return False
        del offer.told[peer]
        self._batches.tell_gone(offer.key, offer.told, takers)
        offer.told = {}
        layers = min(pull.kv_layers, self._layers)
        offer.peer, offer.wanted = peer, dict.fromkeys(range(1, 1 + layers))
        self._batches.tell(peer, messages.Promised(offer.key))
        self._send(offer)
        return True

    def want(self, peer: WorkerRef, wanted: messages.KvWanted) -> bool:
        """The peer wants this layer's KV as soon as that is there. False if nothing was
        promised."""
        offer = self._offers.get(wanted.batch)
        if offer is None or offer.peer != peer:
            return False
        if 1 <= wanted.layer <= self._layers:
            offer.wanted[wanted.layer] = None
        self._send(offer)
        return True

    def decline(self, peer: WorkerRef, key: BatchKey) -> bool:
        """The peer does not take the request. False if it was neither offered nor promised."""
        offer = self._offers.get(key)
        if offer is None or peer not in (*offer.told, offer.peer):
            return False
        self._leave(offer, peer)
        offer.declined[peer] = None
        return True

    # -- what becomes of them -------------------------------------------------------------------

    def withdraw_from(self, worker: WorkerRef, instance: InstanceId) -> None:
        """The worker is to get none of them."""
        for offer in self._offers.values():
            if worker in offer.told:
                self._batches.tell(worker, messages.Offer(instance, offer.key, (), ()))
        self.leave(worker)

    def leave(self, peer: WorkerRef) -> None:
        """The peer is to get nothing more. One that is still reached frees what it has reserved for
        a promise."""
        for offer in self._offers.values():
            if peer == offer.peer:
                self._batches.tell(peer, messages.Gone(offer.key))
            self._leave(offer, peer)

    def take(self, sequence: SequenceState) -> EarlyOffer | None:
        """The Run is over, and the request decodes."""
        for key, offer in self._offers.items():
            if offer.sequence is sequence:
                return self._offers.pop(key)
        return None

    def drop_all(self, takers: Mapping[WorkerRef, InstanceId]) -> None:
        """What is left does not decode elsewhere: it has ended, or was cancelled."""
        for offer in self._offers.values():
            self._batches.tell_gone(offer.key, offer.told, takers)
            if offer.peer is not None:
                self._batches.tell(offer.peer, messages.Gone(offer.key))
        self._offers.clear()

    # -- helpers, in the order used -------------------------------------------------------------

    def _send(self, offer: EarlyOffer) -> None:
        """KV that is wanted and there."""
        if offer.peer is None:
            return
        for layer in [layer for layer in offer.wanted if layer < self._layers_stop]:
            del offer.wanted[layer]
            self._batches.tell(offer.peer, messages.KvLayer(offer.key, layer))

    def _leave(self, offer: EarlyOffer, worker: WorkerRef) -> None:
        offer.told.pop(worker, None)
        if offer.peer == worker:
            offer.peer, offer.wanted = None, {}
