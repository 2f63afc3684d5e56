"""Evening out after loading: requests that decode move, with their KV, to an instance with fewer.

A target that has everything and nothing in line tells its source how many requests it has
(`Balance`). The source offers some of its own then, as targets offer batches; the former target
pulls them, and when their KV is there it tells its numbers again. It ends when the source finds
none that would gain. Requests pause while their KV travels (Llumnix, OSDI'24, overlaps that with
further decodes), so only those move that have much left to generate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.batching.contract import live_messages as messages
from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.live.live_batches import (
    AHEAD_TOKENS,
    LiveBatches,
    moves_first,
    offer_of,
)
from livescale.batching.live.live_taker import LiveTaker
from livescale.batching.runs.run import BatchKey
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import InstanceId, RequestId, WorkerRef


@dataclass(slots=True)
class _Emptier:
    """An instance that may have fewer requests, and what it was offered last."""

    balance: messages.Balance
    offer: messages.Offer | None = None
    sequences: list[SequenceState] = field(default_factory=list)


class LiveMover:
    """Chooses what is offered to whom: `even` makes this instance tell its numbers, a Balance makes
    it offer. The LiveGiver hands over what is pulled, the `taker` pulls what is offered."""

    def __init__(self, batches: LiveBatches, limits: LiveLimits, taker: LiveTaker) -> None:
        self._batcher = batches.batcher
        self._batches = batches
        self._instance = batches.instance
        self._limits = limits
        self._taker = taker
        #: who may have more, whether they are to be told (again), and whether something comes
        self._fuller: dict[WorkerRef, InstanceId] = {}
        self._is_due = self._is_moving = False
        #: who may have fewer
        self._emptier: dict[WorkerRef, _Emptier] = {}
        #: what one step of decodes took here last (0: not known)
        self.step_ns = 0

    @property
    def is_idle(self) -> bool:
        """No instance was asked to have fewer."""
        return not self._emptier

    def even(self, peer: WorkerRef, instance: InstanceId) -> None:
        """This instance may have fewer requests than that one, which it was paired with."""
        self._fuller[peer] = instance
        self._is_due = True

    def balance(self, peer: WorkerRef, balance: messages.Balance) -> None:
        """The peer may have more, and has so many."""
        if balance.source == self._instance:
            self._emptier.setdefault(peer, _Emptier(balance)).balance = balance

    def offers(self, peer: WorkerRef, key: BatchKey) -> bool:
        """The peer was offered requests as this batch."""
        other = self._emptier.get(peer)
        return other is not None and other.offer is not None and other.offer.batch == key

    def take_out(self, peer: WorkerRef) -> LiveBatch | None:
        """Of what the peer was offered: those that still decode here, and have no more tokens than
        were offered."""
        other = self._emptier[peer]
        offer, sequences, other.offer = other.offer, self._ready(other), None
        if offer is None or not sequences:
            return None
        # It tells its numbers again when it has them.
        self.leave(peer)
        return self._batches.take_decoding(offer.batch, sequences)

    def leave(self, peer: WorkerRef) -> None:
        """The peer is to get nothing more."""
        self._emptier.pop(peer, None)

    def give_up(self, peer: WorkerRef) -> None:
        """Nothing more comes from there, or goes there."""
        self._emptier.pop(peer, None)
        self._fuller.pop(peer, None)

    def forget_all(self) -> None:
        """The instance goes."""
        for peer in sorted(self._emptier):
            self._batches.tell(peer, messages.Parted(self._instance))
        self._emptier, self._fuller = {}, {}

    def talk(self) -> None:
        """Tell who has more how many there are here, and offer requests to those who have fewer.
        Between two Runs."""
        is_moving = any(batch.decoding for batch in self._batches.taken.values())
        if self._is_due or (self._is_moving and not is_moving):
            requests, token_ps = len(self._batcher.requests()), self._taker.kv.token_ps
            for peer, instance in sorted(self._fuller.items()):
                balance = messages.Balance(instance, self._instance, requests, token_ps)
                self._batches.tell(peer, balance)
        self._is_due, self._is_moving = False, is_moving
        if self._emptier and not self._batches.taken:
            for peer in sorted(self._emptier):
                self._offer(peer, self._emptier[peer])

    # -- helpers, in the order used -------------------------------------------------------------

    def _ready(self, other: _Emptier) -> list[SequenceState]:
        if other.offer is None:
            return []
        return self._batches.still_decoding(other.sequences, other.offer.tokens)

    def _offer(self, peer: WorkerRef, other: _Emptier) -> None:
        """Offer what would gain by moving there, unless that has been done; forget the one to whom
        nothing is to be given."""
        if self._ready(other):
            return
        offered, other.offer = other.offer, None
        count = self._surplus(other.balance) // 2
        candidates = self._candidates()
        if count and offered is None and not (self.step_ns and candidates):
            return  # they compute their prompts
        other.sequences = self._chosen(other.balance, candidates[:count])
        if other.sequences:
            key, taker = self._batches.next_key(), other.balance.target
            other.offer = offer_of(key, taker, other.sequences, AHEAD_TOKENS)
            self._batches.tell(peer, other.offer)
            return
        if offered is not None:
            self._batches.tell(peer, messages.Offer(offered.source, offered.batch, (), ()))
        del self._emptier[peer]

    def _surplus(self, balance: messages.Balance) -> int:
        """How many requests more are here than there, without those that are to go elsewhere."""
        going = len(self._going()) + sum(
            len(batch.sequences)
            for batch in self._batches.given.values()
            if batch.decoding and not batch.is_taken
        )
        return max(len(self._batcher.requests()) - going - balance.requests, 0)

    def _going(self) -> dict[RequestId, None]:
        """Requests that were offered."""
        others = (other for other in self._emptier.values() if other.offer is not None)
        return {s.spec.request: None for other in others for s in other.sequences}

    def _candidates(self) -> list[SequenceState]:
        """Who might move: not the one that came first."""
        going = self._going()
        found = [
            sequence
            for sequence in self._batcher.lines.decoding()[1:]
            if sequence.spec.request not in going
            # Tokens are told again, but of their logprobs nothing is known elsewhere.
            and sequence.spec.sampling.logprobs is None
        ]
        return sorted(found, key=moves_first)

    def _chosen(
        self, balance: messages.Balance, candidates: list[SequenceState]
    ) -> list[SequenceState]:
        """The first ones, as long as moving all of them together pays for each."""
        if not balance.kv_token_ps:
            return candidates[:1]  # how long it takes is to be seen
        chosen: list[SequenceState] = []
        tokens, least = 0, 1 << 62
        for sequence in candidates:
            tokens += sequence.computed
            least = min(least, sequence.outputs_left)
            pause_ns = tokens * balance.kv_token_ps // 1000
            is_short = least * self.step_ns < self._limits.move_factor * pause_ns
            if is_short or (chosen and tokens > self._limits.batch_tokens_max):
                break
            chosen.append(sequence)
        return chosen
