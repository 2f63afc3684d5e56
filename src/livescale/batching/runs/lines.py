"""The two lines of one instance: requests that wait, and requests that run."""

from __future__ import annotations

from collections import OrderedDict

from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import RequestId


class Lines:
    """Both are in order of arrival, and what waits arrived after what runs (but for requests
    that were held in between)."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[RequestId, SequenceState] = OrderedDict()
        self.running: OrderedDict[RequestId, SequenceState] = OrderedDict()
        #: requests that ever arrived: the order of the last one
        self.arrivals = 0
        #: (request, attempt) pairs since the last call of `take_admitted`, and of `take_started`
        self._admitted: list[tuple[RequestId, int]] = []
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
        """Running requests that have a token and whose next one needs one position only, the
        earliest first. (Of a prompt one position may be left, too.)"""
        return [s for s in self.running.values() if s.tokens_left == 1 and s.generated]

    @property
    def has_begun_prompts(self) -> bool:
        """Of some running request prompt tokens are left to compute."""
        return any(sequence.tokens_left > 1 for sequence in self.running.values())

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens in both lines that are not computed, those of preempted requests again."""
        sequences = (*self.waiting.values(), *self.running.values())
        left = [sequence.prefill_tokens - sequence.computed for sequence in sequences]
        return sum(tokens for tokens in left if tokens > 0)

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

    @property
    def begun_prompt_tokens(self) -> int:
        """Prompt tokens that are computed, of requests that have emitted no token here."""
        sequences = (s for s in self.running.values() if not s.is_started)
        return sum(min(s.computed, len(s.spec.prompt_ids)) for s in sequences)

    def admit(self, sequence: SequenceState) -> None:
        """It has blocks, maybe for the first time."""
        if not sequence.is_admitted:
            sequence.is_admitted = True
            self._admitted.append((sequence.spec.request, sequence.spec.attempt))

    def start(self, sequence: SequenceState) -> None:
        """It emits a token, maybe the first one here."""
        if not sequence.is_started:
            sequence.is_started = True
            self._started.append((sequence.spec.request, sequence.spec.attempt))

    def take_admitted(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) pairs that first had blocks since the last call."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def take_started(self) -> tuple[tuple[RequestId, int], ...]:
        """(request, attempt) pairs that emitted their first token here since the last call."""
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
            assert sequence.is_admitted, request
            assert 0 <= sequence.computed < sequence.known_tokens, request
            assert len(sequence.generated) < sequence.spec.sampling.output_tokens_max, request
        for request, sequence in self.waiting.items():
            assert not sequence.block_table, request
            assert sequence.computed == 0, request
