"""Are the tokens of `bench live` right? Judged when nothing is measured any more."""

from __future__ import annotations

from collections.abc import Sequence

from livescale.bench.live_fleet import AskedRequest
from livescale.bench.live_models import PairSetting
from livescale.bench.token_checks import wrong_greedy_tokens, wrong_timed_tokens


def count_mismatches(setting: PairSetting, asked: Sequence[AskedRequest]) -> int:
    """Wrong tokens, tokens that are missing, and tokens that came twice or from the wrong worker.

    `token_checks` says what is right.
    """
    found = sum(request.strays for request in asked)
    # A request that was cancelled has as many as it has.
    found += sum(
        request.output_tokens - len(request.token_ids)
        for request in asked
        if not request.is_cancelled
    )
    outputs = [(request.prompt_ids, request.token_ids) for request in asked]
    if setting.kind == "timed":
        return found + sum(wrong_timed_tokens(setting.manifest, outputs))
    return found + sum(wrong_greedy_tokens(setting.directory, outputs))
