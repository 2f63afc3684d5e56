"""Request parameters that LiveScale knows and does not honour, at one or both endpoints.

Each is accepted with a value that changes nothing and refused with any other, because an answer
that silently ignores `tools` or `response_format` is wrong. Parameters that a body declares
(`schema.py`) are not looked at; those in neither place are ignored: load generators send their own.
"""

from collections.abc import Container

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


ABSENT = msgspec.Raw()
"""Stands for the JSON of a parameter that a body does not have."""
LOOKED_AT_BYTES = 4096
"""Values that are longer are refused unseen: none of the harmless ones is."""


def refuse_unsupported(body: object, honoured: Container[str]) -> None:
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
    value: object = msgspec.json.decode(raw)
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
        f"{param}={shown} is not supported; leave it out (or send {accepted})",
        param,
        code="unsupported_parameter",
    )
