"""The two lines of one instance: requests that wait, and requests that run."""

from __future__ import annotations

from collections import OrderedDict

from livescale.batching.sequence import SequenceState
from livescale.types import RequestId


class Lines:
    """Both are in order of arrival, and what waits arrived after what runs (but for requests
    that were held in between)."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[RequestId, SequenceState] = OrderedDict()
        self.running: OrderedDict[RequestId, SequenceState] = OrderedDict()
        #: requests that ever arrived: the order of the last one
        self.arrivals = 0
        #: (request, attempt) pairs first admitted since `take_started` was last called
        self._started: list[tuple[RequestId, int]] = []

    def find(self, request: RequestId) -> SequenceState | None:
        return self.running.get(request) or self.waiting.get(request)

    def first_waiting(self) -> SequenceState | None:
        return next(iter(self.waiting.values()), None)

    def waits_since(self, order_max: int | None) -> bool:
        """A request waits that arrived up to then (None: whenever)."""
        first = self.first_waiting()
        return first is not None and (order_max is None or first.order <= order_max)

    def decoding(self) -> list[SequenceState]:
        """Running requests whose next token needs one position only, the earliest first."""
        return [sequence for sequence in self.running.values() if sequence.tokens_left == 1]

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens in both lines that are not computed, those of preempted requests again."""
        sequences = (*self.waiting.values(), *self.running.values())
        return sum(max(s.prefill_tokens - s.computed, 0) for s in sequences)

    def run(self, sequence: SequenceState) -> None:
        """It runs, behind those that arrived before it: a held one may have overtaken others."""
        later = []
        for request, other in reversed(self.running.items()):
            if other.order < sequence.order:
                break
            later.append(request)
        self.running[sequence.spec.request] = sequence
        for request in reversed(later):
            self.running.move_to_end(request)

    def wait_anew(self, sequence: SequenceState) -> None:
        """It lost its blocks: it waits again, before those that arrived after it, and all its
        known tokens are computed again as prompt."""
        sequence.block_table = ()
        sequence.computed = 0
        sequence.prefill_tokens = sequence.known_tokens
        earlier = []
        for request, other in self.waiting.items():
            if other.order > sequence.order:
                break
            earlier.append(request)
        self.waiting[sequence.spec.request] = sequence
        for request in reversed((*earlier, sequence.spec.request)):
            self.waiting.move_to_end(request, last=False)

    def start(self, sequence: SequenceState) -> None:
        """It has blocks, maybe for the first time."""
        if not sequence.is_started:
            sequence.is_started = True
            self._started.append((sequence.spec.request, sequence.spec.attempt))

    def take_started(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) pairs first admitted since the last call."""
        started, self._started = tuple(self._started), []
        return started

    def validate(self) -> None:
        """First come, first served, but for those that were held. Raises AssertionError."""
        for line in (self.running, self.waiting):
            orders = [s.order for s in line.values()]
            assert orders == sorted(set(orders)), "first come, first served"
        first = self.first_waiting()
        for request, sequence in self.running.items():
            overtakes = first is not None and sequence.order > first.order
            was_held = sequence.was_held or (first is not None and first.was_held)
            assert was_held or not overtakes, "first come, first served"
            assert sequence.is_started, request
            assert 0 <= sequence.computed < sequence.known_tokens, request
            assert len(sequence.generated) < sequence.spec.sampling.output_tokens_max, request
        for request, sequence in self.waiting.items():
            assert not sequence.block_table, request
            assert sequence.computed == 0, request
