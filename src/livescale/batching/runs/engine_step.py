"""What came of one step of an engine that schedules by itself. Values only."""

from __future__ import annotations

from livescale.values.types import FinishReason, RequestId, Value


class StepTokens(Value, frozen=True):
    """New tokens of one attempt. Of the attempt's prompt `cached_tokens` were not computed, because
    the engine had their KV; that counts with its first tokens."""

    request: RequestId
    attempt: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class EngineLoad(Value, frozen=True):
    """The engine after a step: requests that run and that wait, prompt tokens that are not computed
    yet, those that are of requests without a first token, and KV blocks of requests. `preemptions`
    counts from the beginning of the instance."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    begun_prompt_tokens: int = 0
    kv_blocks_used: int = 0
    preemptions: int = 0


class EngineStep(Value, frozen=True):
    """Tokens, and the engine's load afterwards. `admitted` requests (with their attempts) had KV
    for the first time. `refused` ones (request, attempt, reason) can never run in this engine. The
    step computed `prefill_tokens` of prompts. One that `is_given_up` gave nothing, and the engine
    has no requests any more."""

    tokens: tuple[StepTokens, ...] = ()
    admitted: tuple[tuple[RequestId, int], ...] = ()
    refused: tuple[tuple[RequestId, int, str], ...] = ()
    load: EngineLoad = EngineLoad()
    prefill_tokens: int = 0
    is_given_up: bool = False
