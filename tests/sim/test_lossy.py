"""A lossy way to the controller: what may get lost on it, and what never does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.messages.events import (
    AnyEvent,
    FirstByteArrived,
    HoldingCompleted,
    InstanceReported,
    LayerArrived,
)
from livescale.sim.base.clock import Clock
from livescale.sim.links.channel import LossyChannel
from livescale.values.types import HoldingId, WorkerRef

KINDS = ("started", "layer", "completed", "report")


def said(kind: str, number: int) -> AnyEvent:
    """The number tells messages of a kind apart."""
    holding = HoldingId(number, WorkerRef(0))
    if kind == "started":
        return FirstByteArrived(holding)
    if kind == "layer":
        return LayerArrived(holding, 0, 0)
    if kind == "completed":
        return HoldingCompleted(holding, 1)
    return InstanceReported(1, (), number, 0, 0, 8, 0)


@given(
    sends=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 100_000_000), st.booleans()), max_size=40
    )
)
def test_only_progress_is_lost_and_the_last_report_comes(
    sends: list[tuple[str, int, bool]],
) -> None:
    clock, came = Clock(), list[AnyEvent]()
    fates = iter([is_lost for kind, _, is_lost in sends if kind in ("layer", "report")])
    channel = LossyChannel(clock, lambda: 1000, came.append, lambda: next(fates))
    messages = [said(kind, number) for number, (kind, _, _) in enumerate(sends)]
    at_ns = 0
    for (_, gap_ns, _), message in zip(sends, messages, strict=True):
        at_ns += gap_ns
        clock.at(at_ns, lambda message=message: channel.send(message))  # type: ignore[misc]
    while clock.run_next():
        pass
    kept = [m for m in messages if isinstance(m, FirstByteArrived | HoldingCompleted)]
    assert [m for m in came if isinstance(m, FirstByteArrived | HoldingCompleted)] == kept
    assert all(came.count(message) <= 1 for message in messages)
    layers = [m for m in came if isinstance(m, LayerArrived)]
    sent = zip(sends, messages, strict=True)
    assert layers == [m for (kind, _, is_lost), m in sent if kind == "layer" and not is_lost]
    reports = [m for m in came if isinstance(m, InstanceReported)]
    assert reports == sorted(reports, key=lambda report: report.running)
    if any(kind == "report" for kind, _, _ in sends):
        assert reports[-1] == [m for m in messages if isinstance(m, InstanceReported)][-1]
