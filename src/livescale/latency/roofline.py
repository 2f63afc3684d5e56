"""The roofline: how long a transformer takes, from peaks and the parts of them that are reached.

Per layer, with M new tokens: linear layers are bound by arithmetic or by reading weights, softly;
activations move; prefills attend at a rate of arithmetic, decodes at a rate of reading KV; ranks
sum twice. Then the head, for the sequences that sample, and what the engine adds.
"""

from __future__ import annotations

from collections.abc import Iterable

from livescale.latency.accelerators import ACCELERATORS, ITERATION_NS, Accelerator, AllReduceFit
from livescale.latency.shapes import TransformerShape
from livescale.latency.work import RunWork
from livescale.values.types import Value

_BF16_BYTES = 2
_ACTIVATION_HIDDENS, _ACTIVATION_HEADS, _ALL_REDUCES = 10, 2, 2


class RooflineLatency(Value, frozen=True, tag="roofline"):
    """One model on one kind of accelerator, tensor-parallel or not: a Run's time in closed form.

    All `_ns` but the last three are nanoseconds of one layer: per new token (`compute_ns`,
    `activation_ns`, `query_ns`, `all_reduce_token_ns`), per pair of positions of a prompt
    (`pair_ns`), per position that a chunk of a prompt attends to (`key_ns`) or that a decode does
    (`context_ns`), per decode (`sequence_ns`), or per Run. The head takes the norm of
    `head_compute_ns` per sampled sequence and `head_weights_ns`; `iteration_ns` comes on top.
    """

    accelerator: str
    model: str
    tp_size: int
    layers: int
    norm: float
    compute_ns: float
    weights_ns: float
    activation_ns: float
    linear_ns: float
    prefill_ns: float
    pair_ns: float
    query_ns: float
    key_ns: float
    decode_fixed_ns: float
    sequence_ns: float
    context_ns: float
    all_reduce_ns: float
    all_reduce_token_ns: float
    head_compute_ns: float
    head_weights_ns: float
    iteration_ns: float

    @classmethod
    def of(cls, kind: str, shape: TransformerShape, tp_size: int = 1) -> RooflineLatency:
        """The model's time on `tp_size` accelerators of a kind.

        Raises ValueError for an unknown kind and for ranks that cannot share the model.
        """
        if kind not in ACCELERATORS:
            raise ValueError(f"unknown accelerator {kind!r}, there are {', '.join(ACCELERATORS)}")
        device = ACCELERATORS[kind]
        kv_heads = shape.kv_heads_of_rank(tp_size)
        heads, head_dim = shape.heads // tp_size, shape.head_dim
        weights = _rank_parameters(shape, tp_size)
        head_weights = shape.hidden * shape.vocabulary / tp_size
        flop_ns = 1e9 / (device.flops_per_s * device.linear_compute)
        byte_ns = 1e9 / (device.memory_bytes_per_s * device.linear_memory)
        attended_ns = 1e9 / (device.flops_per_s * device.prefill_compute)
        moved_ns = 1e9 / (device.memory_bytes_per_s * device.prefill_memory)
        kv_ns = 1e9 / (device.memory_bytes_per_s * device.decode_memory)
        reduce_ns, reduce_token_ns = _all_reduce(device.all_reduce, shape, tp_size)
        return cls(
            accelerator=kind,
            model=shape.name,
            tp_size=tp_size,
            layers=shape.decoder_layers,
            norm=device.linear_norm,
            compute_ns=2 * weights * flop_ns,
            weights_ns=_BF16_BYTES * weights * byte_ns,
            activation_ns=_activation_ns(device, shape, tp_size),
            linear_ns=float(device.linear_ns),
            prefill_ns=float(device.prefill_ns),
            pair_ns=4 * heads * head_dim * attended_ns,
            query_ns=_BF16_BYTES * head_dim * 2 * heads * moved_ns,
            key_ns=_BF16_BYTES * head_dim * 2 * kv_heads * moved_ns,
            decode_fixed_ns=float(device.decode_ns),
            sequence_ns=float(device.sequence_ns),
            context_ns=_BF16_BYTES * head_dim * 2 * kv_heads * kv_ns,
            all_reduce_ns=reduce_ns,
            all_reduce_token_ns=reduce_token_ns,
            head_compute_ns=2 * head_weights * flop_ns,
            head_weights_ns=_BF16_BYTES * head_weights * byte_ns,
            iteration_ns=float(ITERATION_NS),
        )

    # -- whole Runs -------------------------------------------------------------------------

    def run_ns(self, work: RunWork) -> int:
        tokens = work.token_count
        layer_ns = self.linear_layer_ns(tokens) + self.all_reduce_layer_ns(tokens)
        if work.prefills:
            layer_ns += self.prefill_layer_ns(work.prefills)
        if work.decodes:
            layer_ns += self.decode_fixed_ns + self.sequence_ns * work.decodes
        rest_ns = self.rest_ns(work.sampled)
        return self._total_ns(layer_ns, work.decode_context_tokens, rest_ns)

    def decode_ns(self, decodes: int, context_tokens: int, steps: int) -> list[int]:
        layer_ns = self.linear_layer_ns(decodes) + self.all_reduce_layer_ns(decodes)
        if decodes:
            layer_ns += self.decode_fixed_ns + self.sequence_ns * decodes
        rest_ns = self.rest_ns(decodes)
        # `_total_ns` of every step, without a call each: there may be thousands.
        layers, per_context_ns = self.layers, self.context_ns
        return [
            int(layers * (layer_ns + per_context_ns * context) + rest_ns + 0.5)
            for context in (context_tokens + decodes * step for step in range(steps))
        ]

    # -- parts of it, in nanoseconds; of one layer but for the last two ----------------------

    def linear_layer_ns(self, tokens: float) -> float:
        """Everything but attention and all-reduces."""
        bound_ns = _norm(self.compute_ns * tokens, self.weights_ns, self.norm)
        return bound_ns + self.activation_ns * tokens + self.linear_ns

    def all_reduce_layer_ns(self, tokens: int) -> float:
        """Both all-reduces of a layer."""
        return self.all_reduce_ns + self.all_reduce_token_ns * tokens

    def prefill_layer_ns(self, prefills: Iterable[tuple[float, float]]) -> float:
        """Attention of chunks of prompts: (new tokens, tokens before them) each."""
        total_ns = self.prefill_ns
        for new, before in prefills:
            total_ns += self.pair_ns * new * (new / 2 + before)
            total_ns += self.query_ns * new + self.key_ns * (new + before)
        return total_ns

    def rest_ns(self, sampled: int) -> float:
        """The head, and what the engine adds, once per Run."""
        if not sampled:
            return self.iteration_ns
        head_ns = _norm(self.head_compute_ns * sampled, self.head_weights_ns, self.norm)
        return self.iteration_ns + head_ns

    def _total_ns(self, layer_ns: float, context_tokens: int, rest_ns: float) -> int:
        # Half up: the same for `run_ns` and every step of `decode_ns`.
        return int(self.layers * (layer_ns + self.context_ns * context_tokens) + rest_ns + 0.5)


def _norm(first_ns: float, second_ns: float, power: float) -> float:
    total: float = (first_ns**power + second_ns**power) ** (1 / power)
    return total


def _rank_parameters(shape: TransformerShape, tp_size: int) -> float:
    """Parameters of one layer's matrices that a rank multiplies with."""
    shared = shape.kv_heads_of_rank(tp_size) - shape.kv_heads / tp_size
    return shape.linear_parameters / tp_size + 2 * shape.hidden * shape.head_dim * shared


def _activation_ns(device: Accelerator, shape: TransformerShape, tp_size: int) -> float:
    """Per token: what norms, rope, the activation and the residual sums read and write."""
    heads = shape.heads // tp_size + shape.kv_heads_of_rank(tp_size)
    inner = (3 if shape.is_gated else 2) * shape.intermediate / tp_size
    width = _ACTIVATION_HIDDENS * shape.hidden + _ACTIVATION_HEADS * heads * shape.head_dim + inner
    return _BF16_BYTES * width * 1e9 / (device.memory_bytes_per_s * device.activation_memory)


def _all_reduce(
    fits: tuple[AllReduceFit, ...], shape: TransformerShape, tp_size: int
) -> tuple[float, float]:
    """Both all-reduces of a layer: (fixed, per token)."""
    if tp_size == 1:
        return 0.0, 0.0
    fit = next((fit for fit in fits if fit.ranks == tp_size), None)
    if fit is None:
        known = ", ".join(str(fit.ranks) for fit in fits)
        raise ValueError(f"no all-reduce of {tp_size} ranks is known, only of {known}")
    # A ring moves 2 (n - 1) / n of the message over each rank's port.
    moved_bytes = _BF16_BYTES * shape.hidden * 2 * (tp_size - 1) / tp_size
    token_ns = moved_bytes * 1e9 / fit.bus_bytes_per_s
    return float(_ALL_REDUCES * fit.fixed_ns), _ALL_REDUCES * token_ns
