"""Bodies of the requests as OpenAI defines them, and the step from bytes to them.

Types only: ranges and meaning are decided in `sampling.py`, `prompts.py` and `chat.py`, responses
are in `answers.py`. Fields beyond OpenAI's have vLLM's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec

from livescale.gateway.errors import ApiError, invalid
from livescale.gateway.parameters import refuse_unsupported

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both endpoints share. None: the client says nothing."""

    model: str
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens the client asks for at most, if it says; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions. A list of integers is one prompt, any other list several."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[object] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Body = TypeVar("Body", bound=GenerationBody)
AnyBody = TypeVar("AnyBody")

_PLACE = re.compile(r"`\$\.?([^`]*)`$")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")


def decode_body(raw: bytes, body_type: type[Body]) -> Body:
    """The body of a generation request, which asks for nothing that is not available."""
    honoured = body_type.__struct_fields__
    return decode_as(raw, body_type, lambda fields: refuse_unsupported(fields, honoured))


def decode_as(
    raw: bytes,
    body_type: type[AnyBody],
    check: Callable[[dict[str, object]], None] = lambda fields: None,
) -> AnyBody:
    """The body with checked types. Raises ApiError (400) that names the field where it can."""
    try:
        fields = msgspec.json.decode(raw)
        if isinstance(fields, dict):
            check(fields)
        return msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The request body is not valid JSON: {error}"
        raise invalid(message, code="invalid_json") from None


def _validation_error(error: msgspec.ValidationError) -> ApiError:
    """The error with its place as OpenAI writes it: `messages[0].role`."""
    place, missing = _PLACE.search(str(error)), _MISSING_FIELD.search(str(error))
    names = [found.group(1) for found in (place, missing) if found is not None]
    return invalid(str(error), ".".join(names) or None, code="invalid_value")
