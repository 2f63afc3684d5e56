"""Chat templates: messages in, the prompt text the model was trained on out.

What a template runs in is decided in `rendering.py`. No tokenization here.
"""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from livescale.gateway.errors import cut, invalid
from livescale.gateway.rendering import (
    Renderers,
    RenderFailed,
    Rendering,
    RenderTimeout,
    compiled,
)
from livescale.gateway.schema import Message
from livescale.gateway.tokenizer_files import TokenizerFiles

_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued, to find its end in the rendered text."""


_TRIALS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
)
"""Roles of chats that a template is tried with. One that it accepts is enough."""


class ChatTemplate:
    """A model's chat template with its special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError when the source is not a template."""
        compiled(source)
        self._source = source
        self._knows_developer = "developer" in source
        self._special_tokens = special_tokens

    @classmethod
    def of(cls, files: TokenizerFiles) -> ChatTemplate | None:
        """The template of a model, if it has one. Raises ValueError if it is not a template."""
        if files.template is None:
            return None
        try:
            return cls(files.template, files.special_tokens)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template of {files.directory} is not valid: {error}"
            ) from error

    def try_out(self, renderers: Renderers) -> None:
        """Render short chats until the template accepts one. Raises ValueError saying why none."""
        problems = []
        for roles in _TRIALS:
            messages = [{"role": role, "content": "Hello"} for role in roles]
            try:
                renderers.render(self._rendering(messages, add_generation_prompt=True))
                return
            except RenderTimeout as error:
                raise ValueError(str(error)) from error
            except RenderFailed as error:
                problems.append(str(error))
        raise ValueError(problems[0])

    async def render(
        self,
        renderers: Renderers,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text. Raises ApiError (400) if the template refuses the messages, or takes
        too long.

        With `continue_final_message` it ends where the last message does, as if its author went on.
        """
        plain = [self._plain(message, place) for place, message in enumerate(messages)]
        final = plain[-1]["content"] if continue_final_message else None
        if final is not None:
            plain[-1]["content"] += _END_TAG
        try:
            text = await renderers.render_beside(self._rendering(plain, add_generation_prompt))
        except (RenderTimeout, RenderFailed) as error:
            # Foreign code: whatever it raises (its own refusal, a TypeError over a role it does
            # not know) is about these messages.
            problem = "cannot render" if isinstance(error, RenderTimeout) else "does not accept"
            message = f"The model's chat template {problem} these messages: {cut(str(error))}"
            raise invalid(message, "messages", code="chat_template_error") from error
        return text if final is None else _up_to_tag(text, final)

    def _plain(self, message: Message, place: int) -> dict[str, str]:
        """The message as the template expects it: text parts joined, the role `developer` only
        where its source names it, else `system`."""
        if message.tool_calls:
            param = f"messages[{place}].tool_calls"
            raise invalid("Tool calls are not supported", param, "unsupported_parameter")
        is_system = message.role == "developer" and not self._knows_developer
        plain = {"role": "system" if is_system else message.role, "content": _text(message, place)}
        if message.name is not None:
            plain["name"] = message.name
        return plain

    def _rendering(self, plain: list[dict[str, str]], add_generation_prompt: bool) -> Rendering:
        return Rendering(self._source, self._special_tokens, plain, add_generation_prompt)


def _up_to_tag(text: str, final: str) -> str:
    """The text in front of the tag. Raises ApiError (400) if the template moved the message."""
    # As transformers does it: templates that strip messages strip the tag's space, too, and then
    # the message's own trailing space is not theirs, either.
    place = text.rfind(_END_TAG.rstrip())
    if place < 0 or final.strip() not in text:
        message = (
            "The model's chat template does not keep the final message: it cannot be continued"
        )
        raise invalid(message, "continue_final_message", code="chat_template_error")
    is_space_kept = text.startswith(_END_TAG, place)
    return text[:place] if is_space_kept else text[:place].rstrip()


def _text(message: Message, place: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise invalid(
                "Only content parts of the form {'type': 'text', 'text': ...} are supported",
                f"messages[{place}].content[{number}].{'type' if part.type != 'text' else 'text'}",
                "unsupported_content",
            )
        texts.append(part.text)
    return "\n".join(texts)
