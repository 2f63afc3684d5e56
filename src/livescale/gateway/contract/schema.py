"""Bodies of the requests as OpenAI defines them, and the step from bytes to them.

Types only: ranges and meaning are decided in `sampling.py`, `prompts.py` and `chat.py`, responses
are in `answers.py`. Fields beyond OpenAI's have vLLM's names.

Parameters that are known and not honoured, at one or both endpoints, are accepted with a value that
changes nothing and refused with any other, because an answer that silently ignores `tools` or
`response_format` is wrong. Those that no body declares and the list lacks are ignored: load
generators send their own. Fields of messages are known or refused, because a template may read any.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Container
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from livescale.gateway.contract.errors import ApiError, cut, invalid, quoted

MESSAGES_MAX = 2048
"""Messages of a chat, and parts of a message."""
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 256
STOP_TOKEN_IDS_MAX = 256
LOGIT_BIAS_MAX = 1024
REASONING_EFFORT_CHARS_MAX = 64
"""Templates know words such as `low`; which ones is theirs to say."""
PROMPTS_MAX = 128
"""Prompts of a completion, where they are texts or lists of ids."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

ABSENT = msgspec.Raw()
"""Stands for the JSON of what a body does not have."""


def _may_be_absent() -> Any:
    # (As a plain default it could not be described.)
    return msgspec.field(default_factory=lambda: ABSENT)


PositiveInt = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
ReasoningEffort = Annotated[str, Meta(min_length=1, max_length=REASONING_EFFORT_CHARS_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]


class StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both endpoints share. None: the client sent nothing."""

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
    logit_bias: Annotated[dict[str, float], Meta(max_length=LOGIT_BIAS_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens the client asks for at most, if it sent a number; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions. A list of integers is one prompt, any other list several."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/embeddings; `input` is as the prompt of a completion."""

    model: str
    input: str | list[int | str | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class Message(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What templates may read, and behind it what clients send back of an answer: see ECHOES."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | Annotated[list[ContentPart], Meta(max_length=MESSAGES_MAX)] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    annotations: msgspec.Raw = _may_be_absent()
    audio: msgspec.Raw = _may_be_absent()
    function_call: msgspec.Raw = _may_be_absent()
    parsed: msgspec.Raw = _may_be_absent()
    refusal: msgspec.Raw = _may_be_absent()
    tool_calls: msgspec.Raw = _may_be_absent()


MessageList = Annotated[list[Message], Meta(max_length=MESSAGES_MAX)]


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: MessageList
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


HARMLESS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_request": (),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "normalize": (False,),
    "priority": (0,),
    "prompt": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Values that change nothing, by parameter; null always does nothing."""
ECHOES: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "parsed": (),
    "refusal": ("",),
    "tool_calls": ([],),
}
"""And those of the fields that messages of answers have in OpenAI's clients, which send them back
with the next request: there is nothing in them that a template could be given."""
LOOKED_AT_BYTES = 4096
"""Values that are longer are refused unseen: none of the harmless ones is."""

Body = TypeVar("Body", bound=msgspec.Struct)
AnyBody = TypeVar("AnyBody")

_PLACE = re.compile(r"`\$\.?([^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at |$)", re.DOTALL)
_MISSING_FIELD = re.compile(r"required field `(\w+)`")
_echoes = operator.attrgetter(*ECHOES)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE_CHARS_MAX = 200
_SEARCHED_BYTES_MAX = 256 * 1024
"""Where a lone surrogate stands is reported of bodies up to this size."""


def decode_body(raw: bytes, body_type: type[Body]) -> Body:
    """The body of a request to a model, which asks for nothing that is not available."""
    body: Body = decode_as(raw, _with_refusals(body_type))
    if any(_refusable(body_type)(body)):  # hardly ever
        _refuse_unsupported(body, body_type.__struct_fields__)
    return body


def refuse_echoes(message: Message, place: int) -> None:
    """What an answer's message had is empty in this one. Raises ApiError (400, with param)."""
    if not any(_echoes(message)):
        return
    for name, harmless in ECHOES.items():
        raw = getattr(message, name)
        if raw and not _is_harmless(raw, harmless):
            raise _refusal(f"messages[{place}].{name}", raw, harmless)


def decode_as(raw: bytes, body_type: type[AnyBody]) -> AnyBody:
    """The body with checked types. Raises ApiError (400) that names the field where it can.

    What no field of the type wants is passed over: nothing is made of it.
    """
    wanted: Any = body_type
    try:
        body: AnyBody = _decoder(wanted).decode(raw)
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _lone_surrogate(raw) or _not_json(error) from None
    return body


@functools.cache
def _decoder(body_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body_type)


@functools.cache
def _with_refusals(body_type: type[msgspec.Struct]) -> Any:
    """The type with a field for each parameter that it does not declare and that may have to be
    refused: undecoded, because most values are refused whatever is in them."""
    fields = [
        (name, msgspec.Raw, ABSENT) for name in HARMLESS if name not in body_type.__struct_fields__
    ]
    return msgspec.defstruct(body_type.__name__, fields, bases=(body_type,), kw_only=True)


@functools.cache
def _refusable(body_type: type[msgspec.Struct]) -> Callable[[object], tuple[msgspec.Raw, ...]]:
    """The JSON of all that the body's type does not declare, in one call."""
    names = [name for name in HARMLESS if name not in body_type.__struct_fields__]
    return operator.attrgetter(*names)


def _not_json(error: Exception) -> ApiError:
    return invalid(f"The request body is not valid JSON: {error}", code="invalid_json")


def _lone_surrogate(raw: bytes) -> ApiError | None:
    """Half a character, escaped as \\ud800 to \\udfff: the one thing that is JSON and no text."""
    if _SURROGATE.search(raw) is None or len(raw) > _SEARCHED_BYTES_MAX:
        return None
    try:
        place = _surrogate_place(json.loads(raw), "")
    except (ValueError, RecursionError):
        return None
    if place is None:
        return None
    field = place.lstrip(".")[:_PLACE_CHARS_MAX]
    message = (
        f"{field or 'The body'} contains an incomplete surrogate pair, which is an invalid "
        "character"
    )
    return invalid(message, field or None, code="invalid_value")


def _surrogate_place(value: object, place: str) -> str | None:
    """Where the first text is that cannot be encoded, as OpenAI writes it: `messages[0].role`."""
    if isinstance(value, str):
        is_text = value.isascii() or value.encode("utf-8", "ignore").decode() == value
        return None if is_text else place
    entries: list[tuple[str, object]] = []
    if isinstance(value, list):
        entries = [(f"{place}[{number}]", entry) for number, entry in enumerate(value)]
    elif isinstance(value, dict):
        if any(_surrogate_place(name, place) is not None for name in value):
            return place
        entries = [(f"{place}.{name}", entry) for name, entry in value.items()]
    return next(
        (found for at, entry in entries if (found := _surrogate_place(entry, at)) is not None),
        None,
    )


def _validation_error(error: msgspec.ValidationError) -> ApiError:
    """The error with its place as OpenAI writes it: `messages[0].role`."""
    unknown = _UNKNOWN_FIELD.search(str(error))
    if unknown is not None:
        at = _PLACE.search(str(error))
        param = ".".join([*([at.group(1)] if at else []), cut(unknown.group(1))])
        return invalid(f"{param} is unknown. Leave it out", param, code="unknown_parameter")
    place, missing = _PLACE.search(str(error)), _MISSING_FIELD.search(str(error))
    names = [found.group(1) for found in (place, missing) if found is not None]
    return invalid(str(error), ".".join(names) or None, code="invalid_value")


def _refuse_unsupported(body: object, honoured: Container[str]) -> None:
    """Nothing in the body asks for what is not available. Raises ApiError (400, with param).

    The body has an attribute for each parameter of HARMLESS: the JSON of its value, or ABSENT.
    """
    for param, harmless in HARMLESS.items():
        if param in honoured:
            continue
        raw = getattr(body, param)
        if not raw or (param == "tools" and _are_tools_off(body)):
            continue
        if not _is_harmless(raw, harmless):
            raise _refusal(param, raw, harmless)


def _are_tools_off(body: object) -> bool:
    """None of the tools may be called."""
    choice = getattr(body, "tool_choice")  # noqa: B009 (a field that only some types have)
    return bool(choice) and _is_harmless(choice, ("none",), is_null_too=False)


def _is_harmless(
    raw: msgspec.Raw, harmless: tuple[object, ...], *, is_null_too: bool = True
) -> bool:
    if len(raw) > LOOKED_AT_BYTES:
        return False
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # what was passed over unread need not be a value: 1e400, half a character
    if value is None:
        return is_null_too
    return any(_is_same(value, allowed) for allowed in harmless)


def _is_same(value: object, allowed: object) -> bool:
    # True == 1 and False == 0 in Python, but they are different things to ask for.
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _refusal(param: str, raw: msgspec.Raw, harmless: tuple[object, ...]) -> ApiError:
    shown = quoted(bytes(memoryview(raw)[:LOOKED_AT_BYTES]).decode("utf-8", "replace"))
    accepted = " or ".join(["null", *(msgspec.json.encode(v).decode() for v in harmless)])
    return invalid(
        f"{param}={shown} is not supported. Leave it out, or send {accepted}",
        param,
        code="unsupported_parameter",
    )
