"""One live batch: prompts that are computed together, layer by layer, here and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.batching.contract.live_messages import KvAt
from livescale.batching.contract.live_order import Progress
from livescale.batching.contract.visit_messages import Shared
from livescale.batching.runs.run import BatchKey, Run
from livescale.batching.runs.sequence import SequenceState
from livescale.values.types import LayerSpan, RequestId, Value, WorkerRef

MOVE, ANEW, CHEAPER = TEAM_ENDS = ("move", "anew", "cheaper")
"""Of `LiveLimits.team_end`."""

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
    decodes wait for live work. With `kv_ahead` requests that are to decode elsewhere are offered
    while their prompts are computed, and KV of each layer goes while later ones are. With
    `kv_straight` a source whose requests decode elsewhere leaves their KV with the target, and it
    goes from there to where they decode. When a team ends, KV of requests that decode is
    moved (`team_end`: "move"), or computed "anew", or what is predicted to be "cheaper". After
    loading, requests that decode move to an instance that has fewer if they have at least
    `move_factor` times as long to go as moving takes (0: they stay where their KV is). With
    `merges_runs` an instance of a later stage carries Runs that wait out as one. Requests that
    decode are to get tokens every `tbt_ns` on average: a Run with prompts beside them has no more
    tokens than that allows (0: no more than the token budget of a Run).
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
    kv_ahead: bool = True
    kv_straight: bool = True
    team_end: str = CHEAPER
    move_factor: int = 0
    merges_runs: bool = True
    tbt_ns: int = 0

    def __post_init__(self) -> None:
        amounts = ("batches_max", "batch_tokens_max", "span_ns", "kv_layers_ahead", "answer_ns")
        for name in (*amounts, "pulls_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.team_end not in TEAM_ENDS:
            raise ValueError(f"team_end is '{self.team_end}', not one of {', '.join(TEAM_ENDS)}")
        for name in ("pull_early_permille", "move_factor", "tbt_ns"):
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
    #: when KV of its layers came, and when that was asked for: with the pull, or later
    kv_came: dict[int, int] = field(default_factory=dict)
    asked_ns: int = 0
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
    #: of one that was taken over: who else has KV of it, and whether some request decodes here
    kv_at: tuple[KvAt, ...] = ()
    shared: Shared | None = None
    keeps_kv: bool = False
    #: layers below were run where it was taken from
    kv_stop: int = 0
    #: requests of it that are ready to decode elsewhere, or were handed over, and where they were
    lent: dict[BatchKey, None] = field(default_factory=dict)
    lent_from: LiveBatch | None = None
    #: requests of it that other instances than its taker fetch KV of, by the batch they are there
    parts: dict[BatchKey, RequestId] = field(default_factory=dict)

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

    def holder_of(self, layer: int) -> KvAt | None:
        """Which other instance has this layer's KV (None: the one that gave the batch)."""
        holders = (at for at in self.kv_at if at.span.start <= layer < at.span.stop)
        return next(holders, None)

    def worker_of(self, layer: int) -> WorkerRef | None:
        """Who sends this layer's KV."""
        holder = self.holder_of(layer)
        return holder.worker if holder is not None else self.peer

    def hand(self) -> None:
        """It changes hands: these requests and positions are in its rows and its KV."""
        # The last token of a request that decodes is computed where it goes.
        without = int(self.decoding)
        self.handed = tuple((s, s.known_tokens - without) for s in self.sequences)

    def kv_places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Per request that was handed over: its positions, and its block table here. A request that
        has ended meanwhile has none: its KV comes, and is not wanted."""
        return tuple((tokens, sequence.block_table) for sequence, tokens in self.handed)

    def part_places(self, request: RequestId) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """As `kv_places`, of one request that was handed over (none: it is not in the batch)."""
        places = [(n, s.block_table) for s, n in self.handed if s.spec.request == request]
        return tuple((tokens, table) for tokens, table in places if table)

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


@dataclass(slots=True, eq=False)
class EarlyOffer:
    """A request whose prompt the Run in flight completes: it is to decode elsewhere.

    Of `tokens` positions KV will be here. `told` were offered the request, `declined` can never
    hold it. It is promised to `peer` (None: to none yet), which wants the KV of the layers
    `wanted` that was not sent.
    """

    key: BatchKey
    sequence: SequenceState
    tokens: int
    told: dict[WorkerRef, None] = field(default_factory=dict)
    declined: dict[WorkerRef, None] = field(default_factory=dict)
    peer: WorkerRef | None = None
    wanted: dict[int, None] = field(default_factory=dict)

    def kv_places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """As those of a LiveBatch."""
        return ((self.tokens, self.sequence.block_table),)
