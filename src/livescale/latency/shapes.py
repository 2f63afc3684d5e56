"""Models as shapes: exact byte counts, per layer and rank, of well-known checkpoints in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from livescale.latency.work import LinearLatency
from livescale.values.stages import even_stages, stage_specs
from livescale.values.types import ModelSpec, Value

_BF16_BYTES = 2


class TransformerShape(Value, frozen=True):
    """A decoder-only transformer, as far as its bytes and its arithmetic go.

    `intermediate` is the width of the MLP, which has three matrices when it `is_gated`, else two.
    `has_qkv_biases` is Qwen 2's way; `has_biases` stands for OPT's: biases in every linear layer.
    A norm is one vector of the hidden size, two when it `has_norm_biases`. `positions` counts
    learned position rows, which belong to the embedding. A tied head has no matrix of its own.
    """

    name: str
    decoder_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    model_tokens_max: int
    is_tied: bool = False
    is_gated: bool = True
    has_qkv_biases: bool = False
    has_biases: bool = False
    has_norm_biases: bool = False
    positions: int = 0

    @property
    def linear_parameters(self) -> int:
        """Parameters of the matrices of one decoder layer."""
        heads = self.heads + self.kv_heads
        return 2 * self.hidden * self.head_dim * heads + self._mlp_matrices * self._mlp_matrix

    def kv_heads_of_rank(self, tp_size: int) -> int:
        """KV heads that one of `tp_size` ranks holds: where there are fewer heads than ranks, some
        hold the same one. Raises ValueError where the ranks cannot share evenly."""
        if tp_size < 1 or self.heads % tp_size or self.intermediate % tp_size:
            raise ValueError(f"{self.name} cannot be cut into {tp_size} ranks")
        if self.kv_heads % tp_size and tp_size % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} KV heads, {tp_size} ranks")
        return max(1, self.kv_heads // tp_size)

    def spec(self, tp_size: int = 1) -> ModelSpec:
        """Sizes of one rank, cut as Megatron-LM does it (Shoeybi et al., 2019): vocabulary, heads
        and MLP are divided, norms and the biases that follow a sum over ranks are on each.

        Raises ValueError where the ranks cannot share evenly.
        """
        kv_width = 2 * self.kv_heads_of_rank(tp_size) * self.head_dim
        vocabulary = -(-self.vocabulary // tp_size)
        norm = self.hidden * (2 if self.has_norm_biases else 1)
        embedding = vocabulary * self.hidden + self.positions * self.hidden
        head = norm + (0 if self.is_tied else vocabulary * self.hidden)
        decoder = self._decoder_parameters(tp_size, norm)
        counts = (embedding, *([decoder] * self.decoder_layers), head)
        return ModelSpec(
            name=self.name,
            layer_bytes=tuple(_BF16_BYTES * count for count in counts),
            kv_bytes_per_token=_BF16_BYTES * self.decoder_layers * kv_width,
            model_tokens_max=self.model_tokens_max,
            tp_size=tp_size,
            row_bytes_per_token=_BF16_BYTES * self.hidden,
            is_tied=self.is_tied,
        )

    # -- helpers, in the order used ---------------------------------------------------------

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.is_gated else 2

    @property
    def _mlp_matrix(self) -> int:
        return self.hidden * self.intermediate

    def _decoder_parameters(self, tp_size: int, norm: int) -> int:
        kv_heads = self.kv_heads_of_rank(tp_size)
        heads = self.heads // tp_size
        qkv_width = (heads + 2 * kv_heads) * self.head_dim
        attention = self.hidden * (qkv_width + heads * self.head_dim)
        mlp = self._mlp_matrices * self._mlp_matrix // tp_size
        biases = qkv_width if self.has_qkv_biases or self.has_biases else 0
        if self.has_biases:
            inner = (self._mlp_matrices - 1) * self.intermediate // tp_size
            biases += inner + 2 * self.hidden
        return attention + mlp + biases + 2 * norm


class ExecutedModel(Value, frozen=True):
    """A model of which only size and execution time are known, cut into equal stages.

    `executed_ns` is what one request takes on one accelerator, all stages together.
    """

    name: str
    size_bytes: int
    executed_ns: int
    request_tokens: int = 1
    stages: int = 8

    def spec(self) -> ModelSpec:
        """A layer per stage, bytes divided evenly. It keeps nothing between tokens; one byte of
        KV per token stands for it, so that requests can be counted in blocks."""
        bounds = [self.size_bytes * stage // self.stages for stage in range(self.stages + 1)]
        sizes = tuple(stop - start for start, stop in pairwise(bounds))
        return ModelSpec(self.name, sizes, kv_bytes_per_token=1, model_tokens_max=1 << 20)

    def latency(self) -> LinearLatency:
        """Every Run takes as long as one request."""
        return LinearLatency(base_ns=self.executed_ns, per_token_ns=0)

    def in_stages(self, shares: Sequence[int], row_bytes_per_token: int) -> StagedModel:
        """The model cut into its stages, of equal sizes; `shares[i]` says what part of the time
        stage i takes. Embedding and head are no layers of their own here: they have no bytes.

        Raises ValueError where there is no share for each stage, or one is not positive.
        """
        if len(shares) != self.stages or min(shares) < 1:
            raise ValueError(f"{self.name} has {self.stages} stages, not shares {tuple(shares)}")
        whole = msgspec.structs.replace(
            self.spec(),
            layer_bytes=(0, *self.spec().layer_bytes, 0),
            kv_bytes_per_token=self.stages,
            row_bytes_per_token=row_bytes_per_token,
        )
        edges = [self.executed_ns * done // sum(shares) for done in accumulate(shares, initial=0)]
        times = tuple(LinearLatency(stop - start, 0) for start, stop in pairwise(edges))
        return StagedModel(stage_specs(whole, even_stages(whole, self.stages)), times)


class StagedModel(Value, frozen=True):
    """Stages of an executed model, in order, and how long a Run takes at each."""

    specs: tuple[ModelSpec, ...]
    latencies: tuple[LinearLatency, ...]


_SHAPES = (
    TransformerShape("llama-7b", 32, 4096, 32, 32, 128, 11008, 32000, 2048),
    TransformerShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
    TransformerShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
    TransformerShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
    TransformerShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192),
    TransformerShape("mistral-24b", 40, 5120, 32, 8, 128, 32768, 131072, 32768),
    TransformerShape(
        "qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, 32768, has_qkv_biases=True
    ),
    TransformerShape(
        "opt-66b",
        64,
        9216,
        72,
        72,
        128,
        36864,
        50272,
        2048,
        is_tied=True,
        is_gated=False,
        has_biases=True,
        has_norm_biases=True,
        positions=2050,
    ),
)

PRESETS: dict[str, TransformerShape] = {shape.name: shape for shape in _SHAPES}
"""Shapes by name. mistral-24b is Mistral-Small-24B; llama-7b (the first LLaMA) and opt-66b are the
two of QUART's models that are decoder-only transformers."""

_GB, _MS_NS = 1_000_000_000, 1_000_000
_EXECUTED = (
    ExecutedModel("whisper-9b", 29 * _GB // 10, 74 * _MS_NS),
    ExecutedModel("bert-21b", 43 * _GB, 137 * _MS_NS, request_tokens=128),
    ExecutedModel("llama-7b", 14 * _GB, 243 * _MS_NS, request_tokens=1024),
    ExecutedModel("opt-66b", 132 * _GB, 278 * _MS_NS, request_tokens=128),
    ExecutedModel("wideresnet", 16 * _GB, 646 * _MS_NS),
)

EXECUTED: dict[str, ExecutedModel] = {model.name: model for model in _EXECUTED}
"""QUART's five as its Table 1 has them: gigabytes, tokens of a request, execution time alone on a
GPU, eight stages. (2.9 GB are not nine billion parameters: the size is taken, not the name.)"""

LLAMA_3_8B = PRESETS["llama-3-8b"].spec()
"""Llama 3 8B in bf16: 8,030,261,248 parameters, embedding and head not tied."""
