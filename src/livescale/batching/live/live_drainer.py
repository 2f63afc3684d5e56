"""Draining: an instance that is to become empty passes what it has on.

Requests that decode move with their KV, as between live pairs: a few are offered, a taker with room
for them pulls, and KV of all layers follows. They pause meanwhile, so that no more KV is on its way
at once than arrives within the time that live work may keep decodes waiting. Where prompts are
computed faster than KV travels, and within that time, the attempt is given back instead. So is
what has not begun. The rest ends here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.batching.contract import live_messages as messages
from livescale.batching.live.live_batch import LiveBatch, LiveLimits
from livescale.batching.live.live_batches import (
    AHEAD_TOKENS,
    LiveBatches,
    moves_first,
    offer_of,
)
from livescale.batching.live.live_pace import LivePace
from livescale.batching.runs.run import BatchKey
from livescale.batching.runs.sequence import SequenceState
from livescale.values.routes import Taker
from livescale.values.types import RequestId, WorkerRef

_UNDER_WAY_MAX = 4
"""Batches that have left and whose KV is not all there: while one begins, another one's travels."""
_SAMPLES_MIN = 3
"""Batches after which what was measured says that KV travels slowly, and not that it waited."""
_MOVES_MAX = 6
"""A request that has been on so many instances stays where it is."""


@dataclass(slots=True)
class _Offered:
    """What is offered, to whom, and how many tokens these requests had when a taker was told."""

    batch: BatchKey
    sequences: list[SequenceState]
    tokens: tuple[int, ...]
    told: dict[WorkerRef, None]
    known_tokens: int


class LiveDrainer:
    """Chooses what is offered to whom. The LiveGiver hands over what is pulled."""

    def __init__(self, batches: LiveBatches, limits: LiveLimits, pace: LivePace) -> None:
        self._batcher = batches.batcher
        self._batches = batches
        self._limits = limits
        self._pace = pace
        #: the one that took last is the last
        self._takers: dict[WorkerRef, Taker] = {}
        self._offered: _Offered | None = None
        self._under_way: dict[BatchKey, None] = {}
        self._returned: list[tuple[RequestId, int]] = []
        #: how many batches have arrived, and what their KV took per token at least (0: not known)
        self._samples = self._least_ps = 0
        #: what the last two Runs took, and the last step of decodes (0: not known)
        self._runs_ns = (0, 0)
        self.step_ns = 0

    @property
    def is_idle(self) -> bool:
        """There is no instance that could take anything."""
        return not self._takers and not self._returned

    def drain_to(self, takers: Sequence[Taker]) -> None:
        """These may take what is here, and no others."""
        self._withdraw()
        self._takers = {taker.partner.worker: taker for taker in takers}

    def offers(self, peer: WorkerRef, key: BatchKey) -> bool:
        """The peer was offered requests as this batch."""
        offered = self._offered
        return offered is not None and offered.batch == key and peer in offered.told

    def take_out(self, peer: WorkerRef) -> LiveBatch | None:
        """Of what the peer was offered: those that still decode here, and have no more tokens than
        were offered."""
        offered = self._offered
        sequences = self._ready()
        self._withdraw(besides=peer)
        if offered is None or not sequences:
            return None
        self._takers[peer] = self._takers.pop(peer)
        self._under_way[offered.batch] = None
        return self._batches.take_decoding(offered.batch, sequences)

    def ran(self, elapsed_ns: int) -> None:
        """A Run ended that took so long."""
        self._runs_ns = (self._runs_ns[1], elapsed_ns)

    def settled(self, tokens: int, elapsed_ns: int) -> None:
        """So long after their handover a taker has the KV of so many tokens."""
        # The first wish for KV, and this message, waited for Runs to end.
        measured = max(elapsed_ns - sum(self._runs_ns), 1) * 1000 // max(tokens, 1) + 1
        self._samples += 1
        self._least_ps = min(measured, self._least_ps or measured)

    def leave(self, peer: WorkerRef) -> None:
        """The peer is to get nothing more."""
        if self._takers.pop(peer, None) is not None and self._offered is not None:
            self._offered.told.pop(peer, None)

    def forget_all(self) -> None:
        """The instance goes."""
        self._withdraw()
        self._takers = {}

    def talk(self) -> None:
        """Offer what can go, and forget what is to be computed elsewhere. Between two Runs."""
        if not self._takers:
            return
        for key in [key for key in self._under_way if key not in self._batches.given]:
            del self._under_way[key]
        for sequence in [s for s in self._batcher.lines.waiting.values() if _may_move(s)]:
            self._return(sequence)
        if self._offered is not None and not self._ready():
            self._withdraw()
        if self._offered is not None:
            self._tell_another(self._offered)
        elif len(self._under_way) < _UNDER_WAY_MAX:
            self._offer()

    def take_returned(self) -> list[tuple[RequestId, int]]:
        """What was forgotten since the last call, and is to run elsewhere."""
        returned, self._returned = self._returned, []
        return returned

    # -- helpers, in the order used -------------------------------------------------------------

    def _withdraw(self, besides: WorkerRef | None = None) -> None:
        """What is offered can be had no more; the one who pulled knows."""
        offered, self._offered = self._offered, None
        for peer in offered.told if offered is not None else ():
            if offered is not None and peer != besides:
                instance = self._takers[peer].partner.instance
                self._batches.tell(peer, messages.Offer(instance, offered.batch, (), ()))

    def _ready(self) -> list[SequenceState]:
        if self._offered is None:
            return []
        return self._batches.still_decoding(self._offered.sequences, self._offered.tokens)

    def _return(self, sequence: SequenceState) -> None:
        spec = sequence.spec
        self._batcher.cancel(spec.request, spec.attempt)
        self._returned.append((spec.request, spec.attempt))

    def _tell_another(self, offered: _Offered) -> None:
        """Tell one taker more, if those who were told could have pulled meanwhile."""
        known = sum(sequence.known_tokens for sequence in offered.sequences)
        peer = next((peer for peer in self._takers if peer not in offered.told), None)
        if peer is not None and (not offered.told or known > offered.known_tokens):
            offered.known_tokens = known
            self._tell(offered, peer)

    def _tell(self, offered: _Offered, peer: WorkerRef) -> None:
        offered.told[peer] = None
        instance = self._takers[peer].partner.instance
        most = tuple(sequence.tokens_max for sequence in offered.sequences)
        offer = messages.Offer(instance, offered.batch, offered.tokens, most, decoding=True)
        self._batches.tell(peer, offer)

    def _offer(self) -> None:
        """Offer what gains most by leaving, as long as its KV is there in time with all that is on
        its way. What would be computed sooner elsewhere is returned."""
        # What one batch took may be what it waited: nothing would ever fit again.
        measured_ps = self._least_ps if self._samples >= _SAMPLES_MIN else 0
        token_ps = max(measured_ps, *(taker.kv_token_ps for taker in self._takers.values()))
        gap_ns = self._pace.left_ns(0)
        prefill_ps = self._pace.token_layer_ps * (self._batcher.span.stop - 2)
        chosen: list[SequenceState] = []
        tokens = on_its_way = self._tokens_under_way()
        for sequence in self._candidates():
            if 0 < prefill_ps < token_ps and sequence.known_tokens * prefill_ps <= gap_ns * 1000:
                self._return(sequence)
                continue
            tokens += sequence.computed
            pause_ns = tokens * token_ps // 1000
            is_short = sequence.outputs_left * self.step_ns < sequence.computed * token_ps // 1000
            is_full = chosen and tokens - on_its_way > self._limits.batch_tokens_max
            if sequence.spec.sampling.logprobs is not None or is_short:
                # Tokens are told again, but of their logprobs nothing is known elsewhere.
                tokens -= sequence.computed
            elif pause_ns > gap_ns or is_full:
                tokens -= sequence.computed
            else:
                chosen.append(sequence)
                if not token_ps:
                    break  # how long it takes is to be seen
        if chosen:
            key, peer = self._batches.next_key(), next(iter(self._takers))
            offer = offer_of(key, self._takers[peer].partner.instance, chosen, AHEAD_TOKENS)
            known = sum(sequence.known_tokens for sequence in chosen)
            self._offered = _Offered(key, chosen, offer.tokens, {}, known)
            self._tell(self._offered, peer)

    def _tokens_under_way(self) -> int:
        batches = [self._batches.given[key] for key in self._under_way]
        return sum(tokens for batch in batches for _, tokens in batch.handed)

    def _candidates(self) -> list[SequenceState]:
        return sorted(filter(_may_move, self._batcher.lines.decoding()), key=moves_first)


def _may_move(sequence: SequenceState) -> bool:
    """It has not been on too many instances."""
    return sequence.spec.attempt + sequence.spec.moves <= _MOVES_MAX
