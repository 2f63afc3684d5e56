"""Evening out after loading: requests that decode move, with their KV, to an instance with fewer.

A target that has everything and nothing in line tells its source how many requests it has
(`Balance`). The source offers some of its own then, as targets offer batches; the former target
pulls them, and when their KV is there it tells its numbers again. It ends when the source finds
none that would gain. Requests pause while their KV travels (Llumnix, OSDI'24, overlaps that with
further decodes), so only those move that have much left to generate.
"""

from __future__ import annotations

from livescale.batching.batcher import Batcher
from livescale.batching.live_batch import LiveBatch, LiveLimits
from livescale.batching.live_giver import LiveGiver
from livescale.batching.live_messages import (
    Balance,
    BatchKey,
    Declined,
    Gone,
    Handover,
    LiveMessage,
    Offer,
    Parted,
    Pull,
)
from livescale.batching.live_taker import LiveTaker
from livescale.batching.sequence import SequenceState
from livescale.types import InstanceId, RequestId, WorkerRef

_AHEAD_TOKENS = 32
"""Tokens that a request may generate between its offer and its handover."""


class LiveMover:
    """Both sides of it on one instance: `even` makes it tell its numbers, `Balance` makes it offer.

    `giver` hands over what is pulled, `taker` pulls what is offered.
    """

    def __init__(
        self,
        batcher: Batcher,
        instance: InstanceId,
        limits: LiveLimits,
        giver: LiveGiver,
        taker: LiveTaker,
    ) -> None:
        self._batcher = batcher
        self._instance = instance
        self._limits = limits
        self._giver = giver
        self._taker = taker
        #: who may have more, whether they are to be told (again), and what comes from there
        self._fuller: dict[WorkerRef, InstanceId] = {}
        self._is_due = False
        self._moving: dict[BatchKey, None] = {}
        #: who may have fewer, and what it was offered
        self._balances: dict[WorkerRef, Balance] = {}
        self._offered: dict[WorkerRef, tuple[Offer, list[SequenceState]]] = {}
        self._outbox: list[tuple[WorkerRef, LiveMessage]] = []
        #: what one step of decodes took here last (0: not known)
        self.step_ns = 0

    @property
    def is_idle(self) -> bool:
        """Nobody was told to have fewer."""
        return not self._balances

    def even(self, peer: WorkerRef, instance: InstanceId) -> None:
        """This instance may have fewer requests than that one, which it was paired with."""
        self._fuller[peer] = instance
        self._is_due = True

    # -- messages -------------------------------------------------------------------------------

    def take_message(self, peer: WorkerRef, message: LiveMessage, now_ns: int) -> bool:
        """False if it is not for this one, or not for it alone."""
        if isinstance(message, Balance):
            if message.source == self._instance:
                self._balances[peer] = message
            return True
        if isinstance(message, Handover) and message.decoding:
            self._moving[message.batch] = None
        elif isinstance(message, Parted) and message.target == self._instance:
            self._forget(peer)
        elif isinstance(message, Pull | Declined):
            offered = self._offered.get(peer)
            if offered is not None and offered[0].batch == message.batch:
                del self._offered[peer]
                if isinstance(message, Pull):
                    self._answer(peer, message.batch, offered, now_ns)
                else:
                    self._forget(peer)
                return True
        return False

    def peer_lost(self, peer: WorkerRef) -> None:
        """Nothing more comes from there, or goes there."""
        self._forget(peer)
        self._fuller.pop(peer, None)
        self._outbox = [entry for entry in self._outbox if entry[0] != peer]

    def forget_all(self) -> None:
        """The instance goes."""
        for peer in sorted(self._offered):
            self._outbox.append((peer, Parted(self._instance)))
        self._balances, self._offered, self._fuller = {}, {}, {}

    def talk(self) -> None:
        """Tell who has more how many there are here, and offer requests to those who have fewer.
        Between two Runs."""
        for key in [key for key in self._moving if key not in self._taker.batches]:
            del self._moving[key]
            self._is_due = True
        if self._is_due:
            self._is_due = False
            requests = len(self._batcher.requests())
            for peer, instance in sorted(self._fuller.items()):
                balance = Balance(instance, self._instance, requests, self._taker.kv_token_ps)
                self._outbox.append((peer, balance))
        if self._balances and not self._taker.batches:
            for peer in sorted(self._balances):
                self._offer(peer)

    def take_outbox(self) -> list[tuple[WorkerRef, LiveMessage]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    # -- helpers, in the order used -------------------------------------------------------------

    def _forget(self, peer: WorkerRef) -> None:
        self._balances.pop(peer, None)
        self._offered.pop(peer, None)

    def _answer(
        self,
        peer: WorkerRef,
        key: BatchKey,
        offered: tuple[Offer, list[SequenceState]],
        now_ns: int,
    ) -> None:
        """Hand over those that still decode here, and have no more tokens than were offered."""
        sequences = self._ready(*offered)
        if not sequences:
            self._outbox.append((peer, Gone(key)))
            return
        for sequence in sequences:
            self._batcher.held.take_running(sequence)
        # It tells its numbers again when it has them.
        del self._balances[peer]
        batch = LiveBatch(key, sequences, self._batcher.span.stop, decoding=True)
        self._giver.hand_over(batch, peer, now_ns)

    def _ready(self, offer: Offer, sequences: list[SequenceState]) -> list[SequenceState]:
        decoding = self._batcher.lines.decoding()
        return [
            sequence
            for sequence, tokens in zip(sequences, offer.tokens, strict=True)
            if sequence.known_tokens <= tokens and any(sequence is other for other in decoding)
        ]

    def _offer(self, peer: WorkerRef) -> None:
        """Offer what would gain by moving there, unless that has been done; forget the one to whom
        nothing is to be given."""
        offered = self._offered.get(peer)
        if offered is not None and self._ready(*offered):
            return
        self._offered.pop(peer, None)
        balance = self._balances[peer]
        count = self._surplus(balance) // 2
        candidates = self._candidates()
        if count and offered is None and not (self.step_ns and candidates):
            return  # they compute their prompts
        sequences = self._chosen(balance, candidates[:count])
        if sequences:
            known = [min(s.known_tokens + _AHEAD_TOKENS, s.tokens_max) for s in sequences]
            most = [s.tokens_max for s in sequences]
            offer = Offer(balance.target, self._giver.next_key(), (*known,), (*most,))
            self._offered[peer] = offer, sequences
            self._outbox.append((peer, offer))
            return
        if offered is not None:
            nothing = Offer(offered[0].source, offered[0].batch, (), ())
            self._outbox.append((peer, nothing))
        self._forget(peer)

    def _surplus(self, balance: Balance) -> int:
        """How many requests more are here than there, without those that are to go elsewhere."""
        going = len(self._going()) + sum(
            len(batch.sequences)
            for batch in self._giver.given.values()
            if batch.decoding and not batch.is_taken
        )
        return max(len(self._batcher.requests()) - going - balance.requests, 0)

    def _going(self) -> dict[RequestId, None]:
        """Requests that were offered."""
        return {s.spec.request: None for _, group in self._offered.values() for s in group}

    def _candidates(self) -> list[SequenceState]:
        """Who might move: not the one that came first; whoever has much to generate and little KV
        before others."""
        going = self._going()
        found = [
            sequence
            for sequence in self._batcher.lines.decoding()[1:]
            if sequence.spec.request not in going
            # Tokens are told again, but of their logprobs nothing is known elsewhere.
            and sequence.spec.sampling.logprobs is None
        ]
        return sorted(found, key=lambda s: (s.computed * 1_000_000 // _left(s), s.order))

    def _chosen(self, balance: Balance, candidates: list[SequenceState]) -> list[SequenceState]:
        """The first ones, as long as moving all of them together pays for each."""
        if not balance.kv_token_ps:
            return candidates[:1]  # how long it takes is to be seen
        chosen: list[SequenceState] = []
        tokens, least = 0, 1 << 62
        for sequence in candidates:
            tokens += sequence.computed
            least = min(least, _left(sequence))
            pause_ns = tokens * balance.kv_token_ps // 1000
            is_short = least * self.step_ns < self._limits.move_factor * pause_ns
            if is_short or (chosen and tokens > self._limits.batch_tokens_max):
                break
            chosen.append(sequence)
        return chosen


def _left(sequence: SequenceState) -> int:
    """Tokens that it may still generate."""
    return sequence.spec.sampling.output_tokens_max - len(sequence.generated)
