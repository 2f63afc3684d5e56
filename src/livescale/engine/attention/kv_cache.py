"""The KV pool: one model's keys and values in blocks, and a request's way in and out.

Which request holds which block is the Batcher's business. No modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from livescale.engine.base.run_result import check_places

_READ_IN_PLACE = (torch.float32, torch.bfloat16)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The CPU tensor's memory as numpy has it; bf16 as its bits, in int16."""
    plain = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return plain.numpy()


class KvSize(NamedTuple):
    """Of one model's cache."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int


class KVCache:
    """One model's cut of a flat pool of bytes: `blocks` blocks of `block_tokens` positions.

    `keys` and `values` are (decoder layers, KV heads, token places, head size); place
    `block * block_tokens + i` is the i-th position of a block, in every layer. Heads come first,
    so that what is gathered for a batch can be multiplied as it lies.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        dtype: torch.dtype,
        size: KvSize,
    ) -> None:
        layers, blocks, block_tokens, kv_heads, head_dim = size
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        shape = (2, layers, kv_heads, blocks * block_tokens, head_dim)
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert size_bytes <= len(pool), f"{size_bytes} bytes of KV in a pool of {len(pool)}"
        self.keys, self.values = pool[:size_bytes].view(dtype).view(shape).unbind(0)
        #: the compiled kernel can read these keys and values where they lie
        self.is_read_in_place = pool.device.type == "cpu" and dtype in _READ_IN_PLACE
        self._arrays = (
            [(as_array(k), as_array(v)) for k, v in zip(self.keys, self.values, strict=True)]
            if self.is_read_in_place
            else []
        )

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The layer's keys and values, each (KV heads, places, head size), if read in place."""
        return self._arrays[layer]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def places(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Places (stop - start) of a request's positions `[start, stop)`."""
        first = start // self.block_tokens
        blocks = block_table[first : -(-stop // self.block_tokens)]
        table = torch.tensor(blocks, device=self.device).unsqueeze(1)
        inside = torch.arange(self.block_tokens, device=self.device)
        skipped = first * self.block_tokens
        return (table * self.block_tokens + inside).flatten()[start - skipped : stop - skipped]

    def export_layer(self, layer: int, block_table: Sequence[int], tokens: int) -> torch.Tensor:
        """A copy of a request's first `tokens` positions in one layer, in token order.

        The result is contiguous, (2, tokens, KV heads, head size): keys, then values. `layer`
        counts decoder layers from 0.
        """
        places = self._first_places(block_table, tokens)
        rows = [table[layer].index_select(1, places) for table in (self.keys, self.values)]
        return torch.stack(rows).transpose(1, 2).contiguous()

    def import_layer(self, layer: int, block_table: Sequence[int], buffer: torch.Tensor) -> None:
        """Write what `export_layer` gave, here or elsewhere, to the places of `block_table`.

        Raises ValueError when the buffer is not KV of this model, or the blocks cannot hold it.
        """
        tokens = buffer.shape[1] if buffer.dim() == 4 else 0
        shape = (2, tokens, self.kv_heads, self.head_dim)
        if buffer.shape != shape or buffer.dtype != self.keys.dtype:
            raise ValueError(
                f"KV of shape {tuple(buffer.shape)} and {buffer.dtype} for a cache of"
                f" (2, tokens, {self.kv_heads}, {self.head_dim}) and {self.keys.dtype}"
            )
        places = self._first_places(block_table, tokens)
        for table, rows in zip((self.keys, self.values), buffer.to(self.device), strict=True):
            table[layer].index_copy_(1, places, rows.transpose(0, 1))

    def _first_places(self, block_table: Sequence[int], tokens: int) -> torch.Tensor:
        check_places(block_table, tokens, self.blocks, self.block_tokens)
        return self.places(block_table, 0, tokens)
