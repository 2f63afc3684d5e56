"""Bodies of the responses as OpenAI defines them, and vLLM's additions to them.

Shapes only: what is in them is decided in `replies.py`. Fields beyond OpenAI's (names as in vLLM):
`stop_reason`, `token_ids`, `prompt_token_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from livescale.values.types import FinishReason

Ids = Sequence[int]


def json_answer(body: object, status: int = 200) -> Response:
    """The body as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` of the prompts were not computed anew."""

    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """One entry per token in each list; `top_logprobs` has the chosen token besides the likely."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    text: str
    index: int = 0
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Ids | UnsetType = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class AnswerHead(msgspec.Struct, kw_only=True):
    """What every answer and every event of one begins with."""

    id: str
    created: int
    model: str


class Completion(AnswerHead, kw_only=True):
    """Response of /v1/completions, and each event of its stream."""

    object: str = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """`bytes`: of the token; its text replaces what is no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    delta: Delta
    index: int = 0
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Ids | UnsetType = UNSET


class ChatChunk(AnswerHead, kw_only=True):
    """One event of a streamed /v1/chat/completions."""

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    message: AssistantMessage
    index: int = 0
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Ids | UnsetType = UNSET


class ChatCompletion(AnswerHead, kw_only=True):
    """Response of /v1/chat/completions."""

    object: str = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class Embedding(msgspec.Struct):
    """`embedding` is a list of numbers, or the base64 of their fp32 values, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(AnswerHead, kw_only=True):
    """Response of /v1/embeddings."""

    object: str = "list"
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelEntry(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "livescale"


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: str = "list"


class Version(msgspec.Struct):
    """Response of /version."""

    version: str


class Healthy(msgspec.Struct):
    """Response of /health, /live and /ping, where nothing is wrong."""

    status: str = "ok"
