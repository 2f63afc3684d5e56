"""Requests as vLLM takes them, and what its outputs say of them."""

from __future__ import annotations

from vllm import SamplingParams as VllmParams
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from livescale.batching.runs.engine_step import StepTokens
from livescale.batching.runs.run import SequenceSpec
from livescale.values.types import FinishReason, TokenLogprobs


def prompt_of(spec: SequenceSpec) -> TokensInput:
    """Tokens that an earlier attempt emitted are prompt, too. Only requests with equal salt share
    KV."""
    token_ids = [*spec.prompt_ids, *spec.generated_ids]
    return tokens_input(token_ids, cache_salt=spec.cache_salt or None)


def params_of(spec: SequenceSpec) -> VllmParams:
    """Raises ValueError for what vLLM refuses."""
    sampling, emitted = spec.sampling, len(spec.generated_ids)
    return VllmParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.temperature else None,
        max_tokens=sampling.output_tokens_max - emitted,
        min_tokens=max(sampling.output_tokens_min - emitted, 0),
        # The model's own are among them, where they end a request.
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def tokens_of(spec: SequenceSpec, output: RequestOutput) -> StepTokens:
    """What is new."""
    (completion,) = output.outputs
    reason = completion.finish_reason
    return StepTokens(
        spec.request,
        spec.attempt,
        tuple(completion.token_ids),
        None if reason is None else FinishReason(reason),
        output.num_cached_tokens or 0,
    )


def logprobs_of(spec: SequenceSpec, output: RequestOutput) -> TokenLogprobs | None:
    """Of the token that is new; None where none are wanted."""
    (completion,) = output.outputs
    count = spec.sampling.logprobs
    if count is None or not completion.logprobs:
        return None
    (token_id,), (found,) = completion.token_ids, completion.logprobs
    ranked = sorted((its.rank, key, its.logprob) for key, its in found.items())
    top = tuple((key, logprob) for rank, key, logprob in ranked if rank <= count)
    return TokenLogprobs(found[token_id].logprob, top[:count])
