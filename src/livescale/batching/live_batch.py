"""One live batch: prompts that are computed together, layer by layer, here and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.batching.live_order import Progress
from livescale.batching.run import BatchKey, Run
from livescale.batching.sequence import SequenceState
from livescale.types import LayerSpan, RequestId, Value, WorkerRef

MOVE_FACTOR = 16
"""Of `LiveLimits.move_factor` where requests move. From 1 to 64 it changed the mean latency of
simulated bursts on an 8B model by less than 3 %; high ones move few requests over slow links."""


class LiveLimits(Value, frozen=True):
    """What bounds live work on one instance.

    A target keeps at most `batches_max` batches in its line. Requests form a batch up to
    `batch_tokens_max` tokens, fewer if one layer of them would take longer than `span_ns`; a longer
    prompt is one alone. A pulled batch runs for at most `span_ns` (and a sixteenth) at a time, but
    for one layer at least: then messages come in; three times as long while no pull is due. Live
    Runs of `gap_ns` together may come between two decodes (0: three quarters of what a Run full of
    prompt tokens takes here: decodes wait that long without live scaling, too). `kv_layers_ahead`
    layers' KV are asked for at once, and come unasked behind the rows if `kv_follows`. A partner
    that does not answer for `answer_ns` is given up. Of
    `pulls_max` batches that a source has pulled the rows may be on their way at once. It asks for
    the next batch when `pull_early_permille` of a full batch are left to do behind the Run in
    flight, or as much earlier as pulls take (0: only as early as pulls take). With
    `decodes_first` requests that decode have a Run between live work and a Run with prompts. With
    `kv_holds_pulls` no rows are pulled while a batch that is computed waits for its KV longer than
    decodes wait for live work. After
    loading, requests that decode move to an instance that has fewer if they have at least
    `move_factor` times as long to go as moving takes (0: they stay where their KV is).
    """

    batches_max: int = 16
    batch_tokens_max: int = 2048
    span_ns: int = 20_000_000
    gap_ns: int = 0
    kv_layers_ahead: int = 16
    answer_ns: int = 5_000_000_000
    pulls_max: int = 2
    pull_early_permille: int = 500
    decodes_first: bool = True
    kv_follows: bool = True
    kv_holds_pulls: bool = True
    move_factor: int = 0

    def __post_init__(self) -> None:
        amounts = ("batches_max", "batch_tokens_max", "span_ns", "kv_layers_ahead", "answer_ns")
        for name in (*amounts, "pulls_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("pull_early_permille", "move_factor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must not be negative")


@dataclass(slots=True, eq=False)
class LiveBatch:
    """Requests that were put together on a target and stay together until their last layer.

    Layers below `next_layer` are done, and `chosen_layers` behind them are what Runs in flight
    compute. `cancelled` requests are computed along, and no answer of theirs is told. `handed` are
    the requests of a batch that changed hands, in the order of its rows, each with the positions
    whose KV follows. Of a batch that was taken over, `kv_missing` lists the
    layers whose KV is still with the target, and `kv_asked` those of them that are on their way.
    Requests that are `decoding` were put together to be moved: no layer of them is run in a batch.
    """

    key: BatchKey
    sequences: list[SequenceState]
    next_layer: int = 0
    chosen_layers: int = 0
    had_turn: bool = False
    decoding: bool = False
    cancelled: dict[RequestId, None] = field(default_factory=dict)
    #: who does not want it; no source does: the target finishes it
    declined: dict[WorkerRef, None] = field(default_factory=dict)
    stays: bool = False
    #: of those that were taken over, the least is computed first
    rank: int = 0
    handed: tuple[tuple[SequenceState, int], ...] = ()
    kv_missing: dict[int, None] = field(default_factory=dict)
    kv_asked: dict[int, None] = field(default_factory=dict)
    #: when the last KV came, or the first was asked for
    kv_since_ns: int = 0
    #: since when all layers of a batch that was taken over are run (0: they are not)
    computed_ns: int = 0
    #: to whom it was handed over, or who keeps what follows of it, and since when: it was handed
    #: over, or asked for, then
    peer: WorkerRef | None = None
    given_ns: int = 0
    #: the source has sent that the attempt is its own now
    is_taken: bool = False

    @property
    def layers_done(self) -> int:
        """Decoder layers that were run."""
        return max(self.next_layer - 1, 0)

    @property
    def chosen_layer(self) -> int:
        """Where the next Run begins."""
        return self.next_layer + self.chosen_layers

    @property
    def tokens(self) -> int:
        return sum(sequence.known_tokens for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        """No instance waits for any of it."""
        return len(self.cancelled) == len(self.sequences)

    def hand(self) -> None:
        """It changes hands: these requests and positions are in its rows and its KV."""
        # The last token of a request that decodes is computed where it goes.
        without = int(self.decoding)
        self.handed = tuple((s, s.known_tokens - without) for s in self.sequences)

    def kv_places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Per request that was handed over: its positions, and its block table here. A request that
        has ended meanwhile has none: its KV comes, and is not wanted."""
        return tuple((tokens, sequence.block_table) for sequence, tokens in self.handed)

    def progress(self) -> Progress:
        """As a live order sees it: between two Runs."""
        return Progress(self.layers_done, self.had_turn)

    def span(self, count: int, layers: int) -> LayerSpan:
        """The model's layers that `count` more decoder layers are, of `layers` in all: the
        embedding rides with the first of them, the head with the last."""
        start = self.chosen_layer
        last = max(start - 1, 0) + count
        return LayerSpan(start, last + 1 if last < layers else layers + 2)

    def choose(self, number: int, span: LayerSpan, *, samples: bool) -> Run:
        """All known tokens of its requests over these layers, next; `samples` with the head."""
        self.chosen_layers += span.stop - span.start
        segments = tuple(s.segment(s.known_tokens, samples=samples) for s in self.sequences)
        return Run(number, span, segments, batch=self.key)
