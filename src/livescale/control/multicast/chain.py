"""Serial forwarding chains (BlitzScale §5.1): the multicast strategy of the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from livescale.topology import Device, hop_bytes_per_s
from livescale.types import Chain, WorkerRef


def plan_chains(
    sources: Sequence[tuple[WorkerRef, ...]],
    targets: Sequence[tuple[WorkerRef, ...]],
    devices: Mapping[WorkerRef, Device],
) -> tuple[Chain, ...]:
    """Chains that bring a model from some of `sources` to all `targets`.

    Both are lists of instances: the workers of each by tensor-parallel rank. Chains join equal
    ranks, so every group of targets gets one chain per rank. Sources come in order of preference.
    As many groups as both lists allow, so that several sources share the work; targets are dealt
    out in falling order of their slowest downlink (a slow node must not delay the nodes behind
    it), then by id. Raises ValueError without a source.
    """
    if not sources:
        raise ValueError("a chain needs a source")

    def rate(workers: tuple[WorkerRef, ...]) -> int:
        return min(_rate(devices[worker].downlink_bytes_per_s) for worker in workers)

    ordered = sorted(targets, key=lambda workers: (-rate(workers), workers))
    count = min(len(sources), len(ordered))
    return tuple(
        Chain(sources[k][rank], tuple(workers[rank] for workers in ordered[k::count]))
        for k in range(count)
        for rank in range(len(sources[k]))
    )


def predict_chain_ns(
    chain: Chain, size_bytes: int, chunk_bytes: int, devices: Mapping[WorkerRef, Device]
) -> int | None:
    """Time until the last target has everything: (chunks + n - 1) / chunks of one copy's time.

    None when no link of the chain has a known rate.
    """
    rates = [hop_bytes_per_s(devices[a], devices[b]) for a, b in chain.hops()]
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    bytes_on_the_way = size_bytes + (len(chain.targets) - 1) * min(chunk_bytes, size_bytes)
    return bytes_on_the_way * 1_000_000_000 // min(known)


def _rate(rate: int | None) -> int:
    return rate if rate is not None else 1 << 62
