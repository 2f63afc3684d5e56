"""Request parameters that LiveScale knows and does not honour, at one or both endpoints.

Each is accepted with a value that changes nothing and refused with any other, because an answer
that silently ignores `tools` or `response_format` is wrong. Parameters that a body declares
(`schema.py`) are not looked at; those in neither place are ignored: load generators send their own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from livescale.gateway.errors import ApiError, invalid, quoted

HARMLESS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Values that change nothing, by parameter; null always does nothing."""


def refuse_unsupported(body: Mapping[str, object], honoured: Container[str]) -> None:
    """Nothing in the body asks for what is not available. Raises ApiError (400, with param)."""
    for param, value in body.items():
        harmless = HARMLESS.get(param)
        if harmless is None or value is None or param in honoured:
            continue
        if param == "tools" and body.get("tool_choice") == "none":
            continue  # none of them may be called
        if not any(_is_same(value, allowed) for allowed in harmless):
            raise _refusal(param, value, harmless)


def _is_same(value: object, allowed: object) -> bool:
    # True == 1 and False == 0 in Python, but they are different things to ask for.
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _refusal(param: str, value: object, harmless: tuple[object, ...]) -> ApiError:
    shown = quoted(msgspec.json.encode(value).decode())
    accepted = " or ".join(["null", *(msgspec.json.encode(v).decode() for v in harmless)])
    return invalid(
        f"{param}={shown} is not supported; leave it out (or send {accepted})",
        param,
        code="unsupported_parameter",
    )
