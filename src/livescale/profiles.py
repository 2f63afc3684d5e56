"""Profiles of accelerators: how long single operations took. Values only; no file is read here."""

from __future__ import annotations

from livescale.types import Value

HEAD = "lm_head"
_OUTSIDE_LAYERS = ("emb", HEAD)


class LinearPoint(Value, frozen=True):
    """Operations on `tokens` rows of one decoder layer, by name; attention is not among them.

    `emb` and `lm_head` are not of a layer: embedding these rows, and head and sampling for them.
    """

    gpu: str
    model: str
    tp_size: int
    tokens: int
    ops_ns: dict[str, int]

    @property
    def layer_ns(self) -> int | None:
        """Sum of the layer's operations; None when there are none in the point."""
        inside = [ns for op, ns in self.ops_ns.items() if op not in _OUTSIDE_LAYERS]
        return sum(inside) if inside else None


class AttentionPoint(Value, frozen=True):
    """Attention of one decoder layer for `batch` sequences of `context_tokens` each.

    `kind` is "prefill" (all of them are new), "decode" (the last of each is) or "extend": what a
    chunk with tokens before it takes beyond a prompt of `context_tokens`, which has as many pairs
    of positions.
    """

    gpu: str
    kind: str
    batch: int
    context_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    ns: int


class AllReducePoint(Value, frozen=True):
    """One collective of `ranks` over a message; `source` says which implementation."""

    gpu: str
    source: str
    ranks: int
    message_bytes: int
    ns: int


class OpProfile(Value, frozen=True):
    """Everything that was measured. `layers` are the decoder layers of the one model in it, where
    there is one."""

    linear: tuple[LinearPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    all_reduce: tuple[AllReducePoint, ...] = ()
    layers: int | None = None
