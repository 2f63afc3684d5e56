"""Bodies of requests and responses as OpenAI defines them, and the step from bytes to requests.

Shapes only: what a value means for generation is decided in `app.py`. Fields beyond OpenAI's:
`ignore_eos`, `return_token_ids`, `stream_options.continuous_usage_stats` (names as in vLLM).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from livescale.gateway.errors import ApiError, invalid
from livescale.gateway.parameters import refuse_unsupported
from livescale.types import FinishReason

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both endpoints share."""

    model: str
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens the client asks for at most, if it says; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions. A list of prompts may hold exactly one."""

    prompt: str | list[int | str | list[int]]


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


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct):
    text: str
    index: int = 0
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Response of /v1/completions, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    delta: Delta
    index: int = 0
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a streamed /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    message: AssistantMessage
    index: int = 0
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """Response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ModelEntry(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "livescale"


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: str = "list"


Body = TypeVar("Body", bound=GenerationBody)

_PLACE = re.compile(r"`\$\.?([^`]*)`$")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")


def decode_body(raw: bytes, body_type: type[Body]) -> Body:
    """The checked request body. Raises ApiError (400) that names the field where it can."""
    try:
        fields = msgspec.json.decode(raw)
        if isinstance(fields, dict):
            refuse_unsupported(fields)
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
