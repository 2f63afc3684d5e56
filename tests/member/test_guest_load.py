"""Layers that a guest takes: each once, in order, whatever befalls its loads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from livescale.member.guest_load import GuestLoad
from livescale.messages.events import HoldingDropped, HoldingFailed, LayerArrived
from livescale.values.types import HoldingId, agent_ref

LAYERS = 4
HOLDING = HoldingId(1, agent_ref(0))
EVENTS = st.one_of(
    st.just("begin"),
    st.just("take"),
    st.just("failed"),
    st.just("dropped"),
    st.integers(0, LAYERS - 1),
)


@given(st.lists(EVENTS, max_size=40))
def test_layers_are_taken_once_and_in_order_and_only_while_they_are_there(
    story: list[str | int],
) -> None:
    load = GuestLoad("m")
    there: set[int] = set()
    taken = []
    for word in ["begin", *story, "begin", *range(LAYERS), *["take"] * LAYERS]:
        if word == "begin":
            load.begin(LAYERS, "these bytes")
            there = set()
        elif word == "failed":
            load.absorb(HoldingFailed(HOLDING, "the sender is gone"))
            there = set()
        elif word == "dropped":
            load.absorb(HoldingDropped(HOLDING))
            there = set()
        elif isinstance(word, int):
            load.absorb(LayerArrived(HOLDING, word, watermark=0))
            there.add(word)
        elif load.next_layer is not None:
            assert load.next_layer in there
            taken.append(load.next_layer)
            load.take()
    assert taken == list(range(LAYERS))
    assert load.is_over
    assert load.problem is None
    load.rewind()
    assert load.next_layer == 0


def test_other_bytes_in_the_middle_of_a_model_end_it() -> None:
    load = GuestLoad("m")
    load.begin(LAYERS, "these bytes")
    load.absorb(LayerArrived(HOLDING, 0, watermark=1))
    load.take()
    load.begin(LAYERS, "other bytes")
    assert load.problem == "model m: its bytes changed while they came"


def test_who_waits_is_told_how_far_it_got_and_why_the_last_load_failed() -> None:
    load = GuestLoad("m")
    assert load.late(5.0) == "model m: the pool sent nothing within 5 s"
    load.begin(LAYERS, "these bytes")
    load.absorb(LayerArrived(HOLDING, 0, watermark=1))
    load.take()
    assert load.late(0.5) == "model m: layer 1 of 4 did not come within 0.5 s"
    load.absorb(HoldingFailed(HOLDING, "checksum"))
    assert load.late(5.0).endswith("within 5 s (the last load failed: checksum)")
    load.end("the pool has ended")
    load.end("something else")
    assert load.problem == "model m: the pool has ended", "the first reason counts"
