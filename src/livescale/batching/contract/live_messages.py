"""What the two instances of a live pair tell each other. Bytes of rows and KV travel beside it.

The target offers, the source pulls (DESIGN: live pair):

| message | from | means |
| --- | --- | --- |
| Offer | target | this batch can be had, or not at present |
| Pull | source | I have KV blocks for it: give it to me, and so much KV behind it |
| Promised | target | the batch is yours when its prompt is computed; KV comes meanwhile |
| Handover | target | the batch, with the rows that go into `next_layer` |
| Gone | target | it cannot be had any more |
| Declined | source | I do not take the batch, or never can: it stays yours |
| Taken | source | the batch is mine now |
| KvWanted | source | send this layer's KV, too; or, to another holder, a request's part of it |
| KvLayer | target | the KV of one layer, in token order |
| Settled | source | I have all that I want: forget the batch |
| Parted | both | nothing more comes: the target is done, or the source cannot help |
| Balance | target | I have everything, and so many requests |

A batch may be offered, and promised to the first that pulls, while its last Run computes its
prompt: then KV of a layer goes when that layer is done, before the Handover.

Until Taken the requests are the target's, and it finishes what was never pulled. A batch may be
offered to several sources: the first Pull gets it. A source may have several pulls under way, so
that the next batches are there when it has computed the last one.

A request that decodes may have KV with several holders: who hands it over names the others
(`kv_at`), and its taker asks each of them.

After Balance the roles are turned round: the source may offer requests that decode, and the former
target pulls them. They go over without rows, and with the KV of all layers.
"""

from __future__ import annotations

from livescale.batching.contract.visit_messages import (
    Disbanded,
    Lead,
    Quota,
    Shared,
    Visit,
    VisitMessage,
)
from livescale.batching.runs.run import BatchKey, SequenceSpec
from livescale.values.types import InstanceId, LayerSpan, RequestId, Value, WorkerRef


class Offer(Value, frozen=True, tag=True):
    """A batch that the source can have: known tokens of each request, and the positions that it
    can ever need KV for (none: it cannot be had at present). Those of requests that decode may be
    more than there are: so many it may have when it is handed over. Requests that are `decoding`
    bring no prefill work: a source with prompts of its own takes them, too.

    `source` is the instance that is meant: a worker that serves another one parts.
    """

    source: InstanceId
    batch: BatchKey
    tokens: tuple[int, ...]
    tokens_max: tuple[int, ...]
    decoding: bool = False

    @property
    def needs(self) -> list[tuple[int, int]]:
        """Per request: known tokens, and the most there will ever be."""
        return list(zip(self.tokens, self.tokens_max, strict=True))


class Pull(Value, frozen=True, tag=True):
    """The source has reserved KV blocks for the batch. `without_rows`: it computes all layers. The
    KV of the first `kv_layers` decoder layers that are done is wanted right behind a Handover that
    needs KV, as if each of them had been asked for."""

    batch: BatchKey
    without_rows: bool = False
    kv_layers: int = 0


class Promised(Value, frozen=True, tag=True):
    """The batch is computed here and goes to the source that pulled: the Handover follows when all
    layers are done, KV of layers that are done goes before. It may be Gone first."""

    batch: BatchKey


class PartOf(Value, frozen=True):
    """A request of a batch that was handed to another instance; or, with `lead`, one of whose
    positions the first `tokens` lie in these blocks of that leader's."""

    batch: BatchKey
    request: RequestId
    lead: Lead | None = None
    blocks: tuple[int, ...] = ()
    tokens: int = 0


class KvAt(Value, frozen=True):
    """A worker that keeps the KV of some layers of a request, as part of something else."""

    worker: WorkerRef
    span: LayerSpan
    part: PartOf


class Handover(Value, frozen=True, tag=True):
    """The batch: its requests in the order of its rows. Layers below `next_layer` are done; the
    rows that go into it come along (none where it is 0). Of the next batch that can be had,
    `following_done` decoder layers are done (0: there is none): what the source may expect.

    Of requests that are `decoding` all layers are done, for every token but the last: no rows. Of
    such a batch of one request, KV may lie elsewhere: `kv_at` says where that of which layers does.
    One of a team that ends is `shared`, and comes without a pull.
    """

    batch: BatchKey
    requests: tuple[SequenceSpec, ...]
    next_layer: int
    decoding: bool = False
    following_done: int = 0
    kv_at: tuple[KvAt, ...] = ()
    shared: Shared | None = None

    @property
    def key(self) -> BatchKey:
        """Names the rows."""
        return self.batch

    @property
    def needs_kv(self) -> bool:
        """Some request does not end with the token that its prefill gives."""
        return self.decoding or any(
            spec.sampling.output_tokens_max > len(spec.generated_ids) + 1 for spec in self.requests
        )

    @property
    def rows(self) -> int:
        """Rows that come along: one per known token of each request."""
        if self.next_layer == 0 or self.decoding:
            return 0
        return sum(spec.known_tokens for spec in self.requests)


class Gone(Value, frozen=True, tag=True):
    """The batch is not to be had: cancelled, or finished by the target."""

    batch: BatchKey


class Declined(Value, frozen=True, tag=True):
    """The source waited no longer for the batch, or can never hold it: it is not offered again."""

    batch: BatchKey


class Taken(Value, frozen=True, tag=True):
    """The batch belongs to the source."""

    batch: BatchKey


class KvWanted(Value, frozen=True, tag=True):
    """Send the KV of this layer of the model for the whole batch: one that was run. With `part` the
    batch is a single request, which was part of that one here."""

    batch: BatchKey
    layer: int
    part: PartOf | None = None


class KvLayer(Value, frozen=True, tag=True):
    """One layer's KV of every request of the batch, one after the other."""

    batch: BatchKey
    layer: int

    @property
    def key(self) -> BatchKey:
        """Of the batch."""
        return self.batch


class Settled(Value, frozen=True, tag=True):
    """The target may forget the batch."""

    batch: BatchKey


class Parted(Value, frozen=True, tag=True):
    """The pair with this target is over (None: with whatever instance the peer has, because what
    that sent was no message); what was handed over stays where it is."""

    target: InstanceId | None


class Balance(Value, frozen=True, tag=True):
    """The former target has everything and `requests` requests, waiting ones included. `source` is
    the instance that is meant. The KV of requests that were moved here last took `kv_token_ps` per
    token (0: none was)."""

    source: InstanceId
    target: InstanceId
    requests: int
    kv_token_ps: int


class UnexpectedMessage(ValueError):
    """A peer's message cannot be: the text says why."""


LiveMessage = (
    Offer
    | Pull
    | Promised
    | Handover
    | Gone
    | Declined
    | Taken
    | KvWanted
    | KvLayer
    | Settled
    | Parted
    | Balance
    | VisitMessage
)


Carrying = Handover | KvLayer | Visit
"""Messages that rows or KV travel with."""

WithRows = Handover | Visit
"""Of these, those with rows."""

AboutGiven = Declined | Taken | KvWanted | Settled
"""What becomes of a batch that was handed over."""


def refusal(message: LiveMessage) -> LiveMessage | None:
    """What a worker says whose instance is gone, or was never meant."""
    if isinstance(message, Offer):
        return Parted(message.batch.target)
    if isinstance(message, Quota):
        return Disbanded(message.lead)
    if isinstance(message, Pull | KvWanted):
        return Gone(message.batch)
    return Declined(message.batch) if isinstance(message, Handover | Promised) else None
