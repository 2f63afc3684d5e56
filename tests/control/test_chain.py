"""Chains: who sends to whom, and how long it takes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.control.multicast.chain import plan_chains, predict_chain_ns
from livescale.topology import Device
from livescale.types import Chain, WorkerRef

W = [WorkerRef(number) for number in range(20)]


def single(*workers: WorkerRef) -> list[tuple[WorkerRef, ...]]:
    """Instances of one worker each."""
    return [(worker,) for worker in workers]


def device(up: int | None = None, down: int | None = None) -> Device:
    return Device("cpu", "h", "l", 1, 1, up, down)


def test_one_source_makes_one_chain_fastest_target_first() -> None:
    """Fig. 14: a slow node must not delay the nodes behind it."""
    devices = {W[0]: device(), W[1]: device(down=5), W[2]: device(down=9), W[3]: device(down=5)}
    (chain,) = plan_chains(single(W[0]), single(W[3], W[1], W[2]), devices)
    assert str(chain) == "w0.0 -> w2.0 -> w1.0 -> w3.0"


def test_an_unlimited_downlink_is_the_fastest() -> None:
    devices = {W[0]: device(), W[1]: device(down=5), W[2]: device()}
    (chain,) = plan_chains(single(W[0]), single(W[1], W[2]), devices)
    assert chain.targets == (W[2], W[1])


def test_several_sources_share_the_targets() -> None:
    devices = dict.fromkeys(W, device())
    chains = plan_chains(single(W[5], W[0]), single(*W[1:4]), devices)
    assert chains == (Chain(W[5], (W[1], W[3])), Chain(W[0], (W[2],)))


def test_more_sources_than_targets_leave_some_idle() -> None:
    devices = dict.fromkeys(W, device())
    assert plan_chains(single(*W[:3]), single(W[7]), devices) == (Chain(W[0], (W[7],)),)


def test_no_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a source"):
        plan_chains([], single(W[0]), {W[0]: device()})


@given(sources=st.integers(1, 6), targets=st.integers(1, 12), downs=st.lists(st.integers(1, 9)))
def test_every_target_is_reached_once(sources: int, targets: int, downs: list[int]) -> None:
    nodes = W[sources : sources + targets]
    speeds = dict(zip(nodes, downs, strict=False))
    devices = {w: device(down=speeds.get(w)) for w in W}
    chains = plan_chains(single(*W[:sources]), single(*nodes), devices)
    assert len(chains) == min(sources, targets)
    reached = [target for chain in chains for target in chain.targets]
    assert sorted(reached) == sorted(nodes)
    lengths = [len(chain.targets) for chain in chains]
    assert max(lengths) - min(lengths) <= 1


def test_chains_join_equal_ranks() -> None:
    devices = {w: device(down=9) for w in W} | {W[3]: device(down=1)}
    targets = [(W[2], W[3]), (W[4], W[5])]
    assert plan_chains([(W[0], W[1])], targets, devices) == (
        Chain(W[0], (W[4], W[2])),  # the instance with a slow rank comes last in every chain
        Chain(W[1], (W[5], W[3])),
    )


@given(n=st.integers(1, 15), chunks=st.integers(1, 1000), chunk_bytes=st.integers(1, 1 << 20))
def test_the_law_of_chains(n: int, chunks: int, chunk_bytes: int) -> None:
    """BlitzScale §5.1: (chunks + n - 1) / chunks of one copy's time."""
    rate = 12_500_000
    devices = dict.fromkeys(W, device(rate, rate))
    size = chunks * chunk_bytes
    chain = Chain(W[0], tuple(W[1 : n + 1]))
    one_copy_ns = Fraction(size * 10**9, rate)
    expected = one_copy_ns * (chunks + n - 1) / chunks
    assert predict_chain_ns(chain, size, chunk_bytes, devices) == int(expected)


def test_the_slowest_link_counts_and_an_unknown_one_does_not() -> None:
    devices = {W[0]: device(up=100), W[1]: device(down=50, up=10), W[2]: device()}
    chain = Chain(W[0], (W[1], W[2]))
    assert predict_chain_ns(chain, 10, 10, devices) == 2_000_000_000
    nothing_known = {w: device() for w in W[:3]}
    assert predict_chain_ns(chain, 10, 10, nothing_known) is None
