"""Are the tokens of a real pool right? Judged when nothing is measured any more.

Real workers are held to a forward of stock transformers in fp32, timed ones to what one executor
makes up that is never disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from livescale.batching.runs.run import Run, Segment
from livescale.engine.timed import TimedExecutor
from livescale.latency.work import LinearLatency
from livescale.values.types import Manifest, SamplingParams

_BLOCK_TOKENS = 16
_KV_BYTES = 64 << 20

Output = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of what was generated after it."""


def wrong_greedy_tokens(directory: Path, outputs: Iterable[Output]) -> list[int]:
    """How many tokens of each output of the model in `directory` are not transformers' choice."""
    # Imported here: torch and transformers take seconds, and nothing else here needs them.
    from livescale.engine.oracle import GreedyOracle

    return [len(check.wrong) for check in GreedyOracle(directory).check_many(list(outputs))]


def wrong_timed_tokens(manifest: Manifest, outputs: Iterable[Output]) -> list[int]:
    """How many tokens of each output are not those that a timed worker makes up."""
    executor = TimedExecutor(_KV_BYTES, _BLOCK_TOKENS, LinearLatency(0, 0))
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for entry in manifest.layers:
        executor.materialize(entry.layer)
    return [_wrong_after(executor, manifest, *output) for output in outputs]


def _wrong_after(
    executor: TimedExecutor, manifest: Manifest, prompt_ids: Sequence[int], output: Sequence[int]
) -> int:
    wrong = 0
    for count, token_id in enumerate(output):
        segment = Segment(
            request="judged",
            attempt=1,
            first_position=len(prompt_ids) + count - 1,
            token_ids=(0,),
            block_table=(),
            samples=True,
            sampling=SamplingParams(len(output)),
            prompt_ids=tuple(prompt_ids),
            generated_ids=output[:count],
        )
        wrong += executor.run(Run(0, manifest.span, (segment,))).token_ids != [token_id]
    return wrong
