"""What a member reports of requests and KV that came to its instance from others."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.contract.live_messages import Handover
from livescale.batching.contract.serving import KvCame
from livescale.batching.runs.run import SequenceSpec
from livescale.messages.events import BatchTaken, KvTaken
from livescale.values.routes import Partner


def batch_taken(
    own: Partner,
    message: Handover,
    wanted: Sequence[SequenceSpec],
    row_bytes: int,
    pull_ns: int,
) -> BatchTaken:
    """Of the batch the requests that are `wanted` are this worker's now."""
    return BatchTaken(
        instance=own.instance,
        worker=own.worker,
        target=message.batch.target,
        requests=tuple((spec.request, spec.attempt, spec.moves) for spec in wanted),
        next_layer=message.next_layer,
        tokens=sum(spec.known_tokens for spec in message.requests),
        row_bytes=row_bytes,
        pull_ns=pull_ns,
    )


def kv_taken(own: Partner, came: KvCame, kv_layer_bytes: int) -> KvTaken:
    """`kv_layer_bytes` are those of one position in one layer."""
    return KvTaken(
        instance=own.instance,
        worker=own.worker,
        requests=came.requests,
        layers=came.layers,
        kv_bytes=came.layers * came.tokens * kv_layer_bytes,
        took_ns=came.last_ns - came.asked_ns,
        arrival_ns=came.last_ns - came.first_ns,
    )
