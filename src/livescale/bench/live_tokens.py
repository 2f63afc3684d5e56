"""Are the tokens of `bench live` right? Judged when nothing is measured any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from livescale.batching.run import Run, Segment
from livescale.bench.live_fleet import AskedRequest
from livescale.bench.live_models import PairSetting
from livescale.engine.timed import TimedExecutor
from livescale.latency.linear import LinearLatency
from livescale.types import SamplingParams

_BLOCK_TOKENS = 16


def count_mismatches(setting: PairSetting, asked: Sequence[AskedRequest]) -> int:
    """Wrong tokens, tokens that are missing, and tokens that came twice or from the wrong worker.

    Timed workers are held to what one executor says that is never disturbed, others to a forward
    of stock transformers in fp32.
    """
    found = sum(request.strays for request in asked)
    # A request that was cancelled has as many as it has.
    found += sum(
        request.output_tokens - len(request.token_ids)
        for request in asked
        if not request.is_cancelled
    )
    judge = _timed_mismatches if setting.kind == "timed" else _greedy_mismatches
    return found + judge(setting, asked)


def _timed_mismatches(setting: PairSetting, asked: Iterable[AskedRequest]) -> int:
    manifest = setting.manifest
    executor = TimedExecutor(setting.kv_bytes, _BLOCK_TOKENS, LinearLatency(0, 0))
    executor.assign(manifest, memoryview(bytearray(manifest.size_bytes)))
    for entry in manifest.layers:
        executor.materialize(entry.layer)
    found = 0
    for request in asked:
        known: list[int] = []
        for token_id in request.token_ids:
            segment = Segment(
                request=request.request,
                attempt=1,
                first_position=len(request.prompt_ids) + len(known) - 1,
                token_ids=(0,),
                block_table=(),
                samples=True,
                sampling=SamplingParams(request.output_tokens),
                prompt_ids=request.prompt_ids,
                generated_ids=known,
            )
            found += executor.run(Run(0, manifest.span, (segment,))).token_ids != [token_id]
            known.append(token_id)
    return found


def _greedy_mismatches(setting: PairSetting, asked: Iterable[AskedRequest]) -> int:
    # Imported here: torch and transformers take seconds, and nothing else here needs them.
    from livescale.engine.oracle import GreedyOracle

    oracle = GreedyOracle(setting.directory)
    pairs = [(request.prompt_ids, request.token_ids) for request in asked]
    return sum(len(check.wrong) for check in oracle.check_many(pairs))
