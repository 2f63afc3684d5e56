"""The prompts of a request: text, token ids (one or several of them), or messages.

How messages become text is decided in `chat.py`, whether a prompt fits its model in `sampling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.errors import (
    ApiError,
    context_length_exceeded,
    cut,
    invalid,
    quoted,
)
from livescale.gateway.contract.schema import ROLES, ChatBody, refuse_echoes
from livescale.gateway.text.text import TextCodec

RawPrompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it; `echo` is the text in front of the answer, if wanted."""

    ids: tuple[int, ...]
    echo: str = ""


def raw_prompts(
    prompt: str | list[int | str | list[int]], param: str = "prompt"
) -> list[RawPrompt]:
    """The prompts of the field `param`. Raises ApiError (400) if ids and texts are mixed."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts = [entry for entry in prompt if not isinstance(entry, int)]
    if ids:
        raise invalid(f"{param} mixes token ids and prompts. Give one kind", param, "invalid_value")
    return list(texts)


def check_fits(card: ModelCard, codec: TextCodec, prompt: RawPrompt, param: str) -> None:
    """The prompt is not longer than the model can hold, as far as its length alone shows.

    Raises ApiError (400). What passes may still have too many tokens, but no more than as many
    characters have that the model could hold.
    """
    limit = card.model_tokens_max
    if isinstance(prompt, str):
        tokens, least = codec.bounds.least_tokens(prompt, limit), "at least "
    else:
        tokens, least = len(prompt), ""
    if tokens >= limit:
        raise too_long(card, f"{least}{tokens}", param)


def too_long(card: ModelCard, tokens: object, param: str) -> ApiError:
    """400: the prompt has so many tokens."""
    return context_length_exceeded(
        f"The prompt has {tokens} tokens. {quoted(card.name)} takes at most "
        f"{card.model_tokens_max}, including the generated ones",
        param,
    )


async def read_prompts(
    codec: TextCodec,
    raw: list[RawPrompt],
    add_special_tokens: bool,
    is_echoed: bool = False,
    param: str = "prompt",
) -> list[Prompt]:
    """The ids of all prompts, in their order. Raises ApiError (400) for ids the model lacks,
    whether a client sent them or the tokenizer made them."""
    texts = [prompt for prompt in raw if isinstance(prompt, str)]
    encoded = iter(await codec.encode_all(texts, add_special_tokens))
    prompts = []
    for prompt in raw:
        if isinstance(prompt, str):
            # An empty text is no prompt, even if special tokens are put around it.
            ids, echo = next(encoded), prompt
            check_made_ids(ids, codec, param)
            prompts.append(Prompt(ids if prompt else (), echo if is_echoed else ""))
        else:
            check_ids(prompt, codec.vocabulary, param)
            echo = await codec.decode(prompt) if is_echoed else ""
            prompts.append(Prompt(tuple(prompt), echo))
    return prompts


def check_chat(body: ChatBody) -> None:
    """There is something to render, in one way. Raises ApiError (400)."""
    if not body.messages:
        raise invalid("messages is empty", "messages")
    for place, message in enumerate(body.messages):
        if message.role not in ROLES:
            raise invalid(
                f"{quoted(message.role)} is an unknown role. Give one of {', '.join(ROLES)}",
                f"messages[{place}].role",
                "invalid_value",
            )
        refuse_echoes(message, place)
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
            "invalid_value",
        )


async def read_chat(card: ModelCard, codec: TextCodec, body: ChatBody) -> Prompt:
    """The messages as the model reads them. Raises ApiError (400) if its template refuses them, or
    its tokenizer makes ids of them that the model lacks."""
    ids = await chat_ids(card, codec, body)
    check_made_ids(ids, codec, "messages")
    return Prompt(ids)


async def chat_ids(card: ModelCard, codec: TextCodec, body: ChatBody) -> tuple[int, ...]:
    """What the tokenizer makes of the messages. Raises ApiError (400) if the model's template
    refuses them."""
    is_continued = bool(body.continue_final_message)
    text = await codec.render_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False and not is_continued,
        continue_final_message=is_continued,
        reasoning_effort=body.reasoning_effort,
    )
    # Templates leave parts out, so that only the rendered text shows how long the prompt is.
    check_fits(card, codec, text, "messages")
    return await codec.encode(text, bool(body.add_special_tokens))


def check_made_ids(ids: Sequence[int], codec: TextCodec, param: str) -> None:
    """All ids that the tokenizer made of `param` are the model's. Raises ApiError (400)."""
    vocabulary = codec.vocabulary
    if max(ids, default=0) < vocabulary:
        return
    foreign = next(token_id for token_id in ids if token_id >= vocabulary)
    [token] = codec.token_strings([foreign])
    raise invalid(
        f"The model's tokenizer makes token id {foreign} ({quoted(token or '')}) of this, which is"
        f" not in the model's vocabulary (0 to {vocabulary - 1})",
        param,
        "foreign_token",
    )


def check_ids(ids: list[int], vocabulary: int, param: str) -> None:
    """All of them are the model's. Raises ApiError (400)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        foreign = next(token_id for token_id in ids if not 0 <= token_id < vocabulary)
        shown, last = cut(str(foreign)), vocabulary - 1
        raise invalid(f"Token id {shown} is not in the model's vocabulary (0 to {last})", param)
