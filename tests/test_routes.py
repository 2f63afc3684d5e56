"""Routes: which KV moves, case by case (DESIGN §8) and against a walk over every layer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.values.routes import KvMove, Stage, kv_moves
from livescale.values.types import LayerSpan

LAYERS = 8
ALL = LayerSpan(1, LAYERS + 1)
P, T, S, D = 1, 2, 3, 4
LOW, HIGH = LayerSpan(1, 4), LayerSpan(4, LAYERS + 1)


@pytest.mark.parametrize(
    ("done", "decode", "moves"),
    [
        pytest.param([(S, ALL)], [(S, ALL)], [], id="unified"),
        pytest.param([(P, ALL)], [(D, ALL)], [KvMove(P, D, ALL)], id="prefill and decode roles"),
        pytest.param([(T, LOW), (S, HIGH)], [(S, ALL)], [KvMove(T, S, LOW)], id="live pair"),
        pytest.param(
            [(T, LOW), (P, HIGH)],
            [(D, ALL)],
            [KvMove(T, D, LOW), KvMove(P, D, HIGH)],
            id="live pair with roles",
        ),
        pytest.param([(S, ALL)], [(D, ALL)], [KvMove(S, D, ALL)], id="a running request moves"),
        pytest.param([(P, LOW), (D, HIGH)], [(P, LOW), (D, HIGH)], [], id="pipeline"),
        pytest.param(
            [(P, LOW), (D, HIGH)], [(P, ALL)], [KvMove(D, P, HIGH)], id="a pipeline ends at one"
        ),
    ],
)
def test_kv_moves_where_decode_runs(
    done: list[Stage], decode: list[Stage], moves: list[KvMove]
) -> None:
    assert kv_moves(done, decode) == moves


@st.composite
def stages(draw: st.DrawFn) -> list[Stage]:
    """All layers in order, cut anywhere, each piece on some instance."""
    cuts = sorted(draw(st.sets(st.integers(2, LAYERS))))
    edges = [1, *cuts, LAYERS + 1]
    return [
        (draw(st.integers(0, 3)), LayerSpan(start, stop))
        for start, stop in itertools.pairwise(edges)
    ]


@given(done=stages(), decode=stages())
def test_every_layer_is_where_decode_runs_it_and_nothing_moves_twice(
    done: list[Stage], decode: list[Stage]
) -> None:
    holders = {layer: place for place, span in done for layer in range(span.start, span.stop)}
    for move in kv_moves(done, decode):
        for layer in range(move.span.start, move.span.stop):
            assert holders[layer] == move.sender != move.receiver
            holders[layer] = move.receiver
    assert holders == {
        layer: place for place, span in decode for layer in range(span.start, span.stop)
    }
