"""How a request wants its tokens chosen and its texts ended: defaults, ranges and bounds.

Types are `schema.py`'s. Here is no tokenization: what is wrong is found before any work is done.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.errors import ApiError, context_length_exceeded, invalid, quoted
from livescale.gateway.contract.schema import PROMPTS_MAX, ChatBody, CompletionBody, GenerationBody
from livescale.gateway.requests.choices import StopString, TextRules
from livescale.gateway.requests.prompts import check_ids, too_long
from livescale.values.types import SamplingDefaults, SamplingParams

GENERATIONS_MAX = PROMPTS_MAX
"""Texts that one request may ask for: prompts times choices of each."""
LOGPROBS_MAX = 20
"""Likely tokens reported beside each chosen one."""
TEMPERATURE_LEAST = 0.01
"""Lower ones above 0 are raised to it, as in vLLM: logits are divided by the temperature."""
SEEDS = 2**63


class _Range(NamedTuple):
    low: float
    high: float
    neutral: float

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}"


RANGES = {
    "temperature": _Range(0, 100, neutral=1),
    "top_p": _Range(1e-6, 1, neutral=1),
    "min_p": _Range(0, 1, neutral=0),
    "frequency_penalty": _Range(-2, 2, neutral=0),
    "presence_penalty": _Range(-2, 2, neutral=0),
    "repetition_penalty": _Range(0.01, 100, neutral=1),
}
"""What the numbers may be, and what they are where neither request nor model gives one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks of each of its generations.

    `sampling` lacks what depends on the prompt and the choice (`output_tokens_max` is 0); see
    `of`. Each prompt gets `choices` answers.
    """

    choices: int
    sampling: SamplingParams
    rules: TextRules
    output_tokens: int | None
    is_seed_given: bool

    def of(
        self, card: ModelCard, prompt_tokens: int, tokens_default: int, choice: int, param: str
    ) -> SamplingParams:
        """How to generate the choice (counted through all prompts).

        Raises ApiError (400) if prompt and output do not fit the model.
        """
        limit = card.model_tokens_max
        _check_length(card, prompt_tokens, self.output_tokens, param)
        most = self.output_tokens or min(tokens_default, limit - prompt_tokens)
        least = self.sampling.output_tokens_min
        if least > most:
            raise _wrong("min_tokens", f"at most {most}, the default of max_tokens", least)
        # With the client's seed equal prompts give equal texts; without, all texts differ.
        place = choice % self.choices if self.is_seed_given else choice
        return msgspec.structs.replace(
            self.sampling, output_tokens_max=most, seed=(self.sampling.seed + place) % SEEDS
        )


def read_asked(card: ModelCard, vocabulary: int, body: GenerationBody, prompts: int) -> Asked:
    """What the body asks for, checked. Raises ApiError (400) that names the parameter."""
    choices = _choices(body, prompts)
    is_ignoring_eos = bool(body.ignore_eos)
    named_ids = body.stop_token_ids or []
    check_ids(named_ids, vocabulary, "stop_token_ids")
    eos_ids = () if is_ignoring_eos else card.eos_token_ids
    tokens_max = body.output_tokens or card.model_tokens_max
    min_tokens = _whole("min_tokens", body.min_tokens, 0, tokens_max, 0)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    rules = TextRules(
        stops=tuple(map(StopString, dict.fromkeys(stops))),
        unstopped_tokens=min_tokens,
        reported_stop_ids=frozenset(named_ids) - set(eos_ids),
        is_stop_shown=bool(body.include_stop_str_in_output),
        skips_special_tokens=body.skip_special_tokens is not False,
    )
    numbers = {name: _number(name, body, card.sampling_defaults) for name in RANGES}
    if 0 < numbers["temperature"] < TEMPERATURE_LEAST:
        numbers["temperature"] = TEMPERATURE_LEAST
    seed = _whole("seed", body.seed, -SEEDS, SEEDS - 1, 0)
    is_seed_given = body.seed is not None and body.seed != -1  # -1 is no seed in vLLM
    sampling = SamplingParams(
        output_tokens_max=0,
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *named_ids))),
        ignore_eos=is_ignoring_eos,
        output_tokens_min=min_tokens,
        top_k=_top_k(body, card.sampling_defaults, vocabulary),
        # A retry on another worker must go on with the same text, so the seed is chosen here.
        seed=seed % SEEDS if is_seed_given else secrets.randbelow(SEEDS),
        logit_bias=_logit_bias(body, vocabulary),
        logprobs=_logprobs(body, vocabulary),
        embeds=False,
        **numbers,
    )
    return Asked(choices, sampling, rules, body.output_tokens, is_seed_given)


def check_defaults(card: ModelCard) -> None:
    """What the model's authors recommend is in range. Raises ValueError naming the model."""
    try:
        read_asked(card, card.model_tokens_max, GenerationBody(model=card.name), 1)
    except ApiError as error:
        where = f"generation_config.json of model {quoted(card.name)}"
        raise ValueError(f"{where}: {error}") from None


# -- helpers, in the order used -------------------------------------------------------------------


def _check_length(card: ModelCard, prompt_tokens: int, asked: int | None, param: str) -> None:
    limit = card.model_tokens_max
    if prompt_tokens == 0:
        raise invalid(f"{param} is empty", param)
    if prompt_tokens >= limit:
        raise too_long(card, prompt_tokens, param)
    if asked is not None and prompt_tokens + asked > limit:
        raise context_length_exceeded(
            f"The prompt has {prompt_tokens} tokens and the request asks for {asked} "
            f"more, {prompt_tokens + asked} in all. {quoted(card.name)} takes at most "
            f"{limit}",
            param,
        )


def _wrong(param: str, wanted: str, value: object) -> ApiError:
    shown = quoted(msgspec.json.encode(value).decode())
    return invalid(f"{param} must be {wanted}, got {shown}", param, "invalid_value")


def _choices(body: GenerationBody, prompts: int) -> int:
    choices = _whole("n", body.n, 1, GENERATIONS_MAX, 1)
    if body.best_of is not None and body.best_of != choices:
        raise _wrong("best_of", f"absent or equal to n ({choices})", body.best_of)
    if prompts * choices > GENERATIONS_MAX:
        raise invalid(
            f"{prompts} prompts times n={choices} makes {prompts * choices} texts, "
            f"above the maximum of {GENERATIONS_MAX} per request",
            "n" if choices > 1 else "prompt",
            "invalid_value",
        )
    return choices


def _whole(param: str, value: int | None, low: int, high: int, neutral: int) -> int:
    if value is None:
        return neutral
    if not low <= value <= high:
        raise _wrong(param, f"from {low} to {high}", value)
    return value


def _number(name: str, body: GenerationBody, defaults: SamplingDefaults) -> float:
    allowed = RANGES[name]
    value = _said(name, body, defaults)
    if value is None:
        return allowed.neutral
    if not allowed.low <= value <= allowed.high:  # nor is NaN
        raise _wrong(name, str(allowed), value)
    return value


def _said(name: str, body: GenerationBody, defaults: SamplingDefaults) -> float | None:
    """The request's word, else the model's."""
    value: float | None = getattr(body, name)
    return getattr(defaults, name, None) if value is None else value


def _top_k(body: GenerationBody, defaults: SamplingDefaults, vocabulary: int) -> int:
    value = _said("top_k", body, defaults) or 0
    if value < -1:
        raise _wrong("top_k", "-1 or 0 (off) or at least 1", value)
    return int(value) if 0 < value < vocabulary else 0


def _logit_bias(body: GenerationBody, vocabulary: int) -> tuple[tuple[int, float], ...]:
    given = body.logit_bias or {}
    biases = {}
    for key, bias in given.items():
        # Longer ones are no ids of any model, and int() of an endless one takes its time.
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(SEEDS))):
            raise _wrong("logit_bias", "a map from token ids to numbers", key)
        check_ids([int(key)], vocabulary, "logit_bias")
        if not -100 <= bias <= 100:
            raise _wrong("logit_bias", "from -100 to 100 for each token", bias)
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _logprobs(body: GenerationBody, vocabulary: int) -> int | None:
    """How many likely tokens are reported; None: nothing is."""
    wanted: int | None = None
    if isinstance(body, CompletionBody) and body.logprobs is not None:
        wanted = _whole("logprobs", body.logprobs, 0, LOGPROBS_MAX, 0)
        if body.echo:
            raise invalid(
                "echo with logprobs is not supported: the pool does not compute log "
                "probabilities of the prompt",
                "echo",
                "unsupported_value",
            )
    elif isinstance(body, ChatBody):
        top = _whole("top_logprobs", body.top_logprobs, 0, LOGPROBS_MAX, 0)
        if top and not body.logprobs:
            raise _wrong("top_logprobs", "absent or 0 unless logprobs is true", top)
        wanted = top if body.logprobs else None
    return None if wanted is None else min(wanted, vocabulary)
