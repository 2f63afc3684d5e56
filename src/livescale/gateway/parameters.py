"""Request parameters that LiveScale knows and cannot honour yet.

Each is accepted with a value that changes nothing and refused with any other, because an answer
that silently ignores `stop` or `temperature` is wrong. Parameters in no table here or in
`schema.py` are ignored: load generators send their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from livescale.gateway.errors import ApiError, invalid, quoted

GREEDY = "only greedy decoding is available yet"

HARMLESS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "temperature": (0,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "top_p": (1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Values that change nothing, by parameter; null always does nothing."""

_SAMPLING = frozenset({"temperature", "top_p"})


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Nothing in the body asks for what is not available. Raises ApiError (400, with param)."""
    for param, value in body.items():
        harmless = HARMLESS.get(param)
        if harmless is None or value is None:
            continue
        if not any(_is_same(value, allowed) for allowed in harmless):
            raise _refusal(param, value, harmless)


def _is_same(value: object, allowed: object) -> bool:
    # True == 1 and False == 0 in Python, but `logprobs: 0` asks for something and `false` does not.
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _refusal(param: str, value: object, harmless: tuple[object, ...]) -> ApiError:
    shown = quoted(msgspec.json.encode(value).decode())
    if param in _SAMPLING:
        wanted = msgspec.json.encode(harmless[0]).decode()
        return invalid(
            f"{param}={shown} is not available: {GREEDY} ({param}={wanted})",
            param,
            code="unsupported_value",
        )
    accepted = " or ".join(["null", *(msgspec.json.encode(v).decode() for v in harmless)])
    return invalid(
        f"{param}={shown} is not supported; leave it out (or send {accepted})",
        param,
        code="unsupported_parameter",
    )
