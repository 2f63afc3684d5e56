"""What both processes of `bench packing` agree on: blocks, steps, and the words between them.

The steps are those of λScale's Figure 17, on sockets. Each adds one thing to the one before; all go
through the data plane's own channel (`transfer/carriers/tcp.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from livescale.engine.files import make
from livescale.latency import shapes
from livescale.transfer.carriers.tcp import TcpCarrier
from livescale.transfer.carriers.token_bucket import TokenBucket
from livescale.transfer.memory.arena import Arena

LOOPBACK = "127.0.0.1"

_BF16_BYTES, _FP32_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class Step:
    """How one block goes from one process to the other.

    `has_memory`: the memory that messages are sent from and received into was taken before, and
    not for each block. `is_packed`: a block is one region and one message, and not one for each
    tensor. `is_in_place`: what is sent is the memory that the block lies in, and not a copy.
    """

    name: str
    adds: str
    has_memory: bool = False
    is_packed: bool = False
    is_in_place: bool = False


STEPS = (
    Step("none", "a message per tensor, memory taken per block, a copy is sent"),
    Step("pre_alloc", "memory is taken before", has_memory=True),
    Step("packing", "one region and one message per block", has_memory=True, is_packed=True),
    Step(
        "in_place",
        "sent from where it lies, without a copy",
        has_memory=True,
        is_packed=True,
        is_in_place=True,
    ),
)


def tcp_carrier(arena: Arena) -> TcpCarrier:
    """Of the data plane, without a limit of its rate, on the loopback address."""
    memory = arena.view(0, arena.size_bytes)
    return TcpCarrier(LOOPBACK, memory, TokenBucket(None), TokenBucket(None))


def messages(tensor_bytes: Sequence[int], is_packed: bool) -> tuple[int, ...]:
    """Sizes of a block's messages, in the order of its tensors."""
    return (sum(tensor_bytes),) if is_packed else tuple(tensor_bytes)


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each message begins in its block."""
    return list(accumulate(sizes, initial=0))[:-1]


# -- words ----------------------------------------------------------------------------------------

#: what is wanted, of which step, and a number: of the block for PREPARE, of the message for PULL
WORD = struct.Struct(">BBQ")
PREPARE, PULL = 1, 2
#: the answer to PREPARE, the digest of the block; a PULL is answered with the message alone
DIGEST = struct.Struct(">Q")
#: at the beginning of each tensor, so that no two blocks are alike
STAMP = struct.Struct(">Q")


# -- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The tensors of one decoder layer, as in checkpoints of the Llama, Mistral and Qwen families:
    two norms, four projections, three matrices for each of `experts`; a gate and two norms of heads
    where there are several."""

    decoder_layers: int
    hidden: int
    heads_width: int
    kv_width: int
    intermediate: int
    element_bytes: int = _BF16_BYTES
    experts: int = 1
    head_dim: int = 0

    def tensor_bytes(self) -> tuple[int, ...]:
        """In the order of the modules."""
        return tuple(self.element_bytes * count for count in self._elements())

    def _elements(self) -> Iterator[int]:
        yield self.hidden
        for width in (self.heads_width, self.kv_width, self.kv_width, self.heads_width):
            yield self.hidden * width
        if self.head_dim:
            yield from (self.head_dim, self.head_dim)
        yield self.hidden
        if self.experts > 1:
            yield self.experts * self.hidden
        yield from [self.hidden * self.intermediate] * (3 * self.experts)


def _of_checkpoint(shape: shapes.TransformerShape) -> LayerShape:
    return LayerShape(
        shape.decoder_layers,
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.intermediate,
    )


def _of_made(sizes: make.Preset) -> LayerShape:
    return LayerShape(
        sizes.decoder_layers,
        sizes.hidden_size,
        sizes.hidden_size,
        sizes.kv_heads * sizes.head_dim,
        sizes.intermediate_size,
        _FP32_BYTES,
    )


_DENSE = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "mistral-24b")

LAYERS: dict[str, LayerShape] = {
    **{name: _of_checkpoint(shapes.PRESETS[name]) for name in _DENSE},
    # A layer of many tensors: 128 experts.
    "qwen3-30b-a3b": LayerShape(48, 2048, 4096, 512, 768, experts=128, head_dim=128),
    **{name: _of_made(sizes) for name, sizes in make.PRESETS.items()},
}
"""Decoder layers by the name of the model: well-known ones in bf16, and what `livescale models
make` makes, in fp32."""
