"""How long each layer takes of a request: what stages are made even by."""

from __future__ import annotations

from livescale.latency.table import TableLatency
from livescale.latency.work import RunWork

_PROMPT_TOKENS, _ANSWER_TOKENS, _DECODES = 512, 32, 8


def request_layer_ns(table: TableLatency) -> tuple[int, ...]:
    """Nanoseconds that each layer of the model, the embedding and the head included, takes for a
    prompt of 512 tokens and 32 tokens after it, of which eight requests have each step in common.

    The embedding copies rows: it counts as nothing.
    """
    prompt = RunWork(prefills=((_PROMPT_TOKENS, 0),), sampled=1)
    steps = table.decode_ns(_DECODES, _DECODES * _PROMPT_TOKENS, _ANSWER_TOKENS)
    heads_ns = _head_ns(table, 1) + _ANSWER_TOKENS * _head_ns(table, _DECODES) / _DECODES
    all_ns = table.run_ns(prompt) + sum(steps) / _DECODES
    layer_ns = round((all_ns - heads_ns) / table.layers)
    return (0, *(layer_ns for _ in range(table.layers)), round(heads_ns))


def _head_ns(table: TableLatency, sampled: int) -> float:
    return table.head.value(sampled) if table.head is not None else 0.0
