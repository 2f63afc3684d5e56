"""Chat templates: messages in, the prompt text the model was trained on out.

What a template runs in is decided in `rendering.py`. No tokenization here.
"""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from livescale.gateway.contract.errors import cut, invalid, quoted
from livescale.gateway.contract.schema import Message
from livescale.gateway.text.content_forms import ContentForms, TemplateMessage, tried_forms
from livescale.gateway.text.rendering import (
    Renderers,
    RenderFailed,
    Rendering,
    RenderTimeout,
    compiled,
)
from livescale.gateway.text.tokenizer_files import TokenizerFiles

_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued, to find its end in the rendered text."""
_READ_FIELDS = ("name", "reasoning", "reasoning_content", "tool_call_id")
"""Fields of messages that templates read, besides role and content."""


class ChatTemplate:
    """A model's chat template with its special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError when the source is not a template."""
        compiled(source)
        self._source = source
        self._knows_developer = "developer" in source
        self._knows_effort = "reasoning_effort" in source
        self._special_tokens = special_tokens
        self._forms = ContentForms()

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
        """Render short chats, to find out in which form the template takes contents.

        Raises ValueError saying why if it accepts none of them.
        """
        problems: list[str] = []
        texts: list[str] = []

        def render(messages: list[TemplateMessage]) -> str | None:
            try:
                text = renderers.render(self._rendering(messages, add_generation_prompt=True))
            except RenderTimeout as error:
                raise ValueError(str(error)) from error
            except RenderFailed as error:
                problems.append(str(error))
                return None
            texts.append(text)
            return text

        self._forms = tried_forms(render)
        if not texts:
            raise ValueError(problems[0])

    @property
    def left_out(self) -> tuple[str, ...]:
        """Roles of messages whose contents the trial did not find in the text."""
        return self._forms.left_out

    async def render(
        self,
        renderers: Renderers,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
    ) -> str:
        """The prompt text. Raises ApiError (400) if the template refuses the messages, takes too
        long, or knows no `reasoning_effort` where there is one.

        With `continue_final_message` it ends where the last message does, as if its author went on.
        """
        if reasoning_effort is not None and not self._knows_effort:
            raise invalid(
                "The model's chat template does not support reasoning_effort"
                f" ({quoted(reasoning_effort)}). Leave it out, or send null",
                "reasoning_effort",
                "unsupported_parameter",
            )
        plain = [self._plain(message, place) for place, message in enumerate(messages)]
        final = _put_tag(plain[-1]) if continue_final_message else None
        rendering = self._rendering(plain, add_generation_prompt, reasoning_effort)
        try:
            text = await renderers.render_beside(rendering)
        except (RenderTimeout, RenderFailed) as error:
            # Foreign code: whatever it raises (its own refusal, a TypeError over a role it does
            # not know) is about these messages.
            problem = "cannot render" if isinstance(error, RenderTimeout) else "does not accept"
            message = f"The model's chat template {problem} these messages: {cut(str(error))}"
            raise invalid(message, "messages", code="chat_template_error") from error
        return text if final is None else _up_to_tag(text, final)

    def _plain(self, message: Message, place: int) -> TemplateMessage:
        """The message as the template expects it: the content in a form that it takes, the role
        `developer` only where its source names it, else `system`."""
        is_system = message.role == "developer" and not self._knows_developer
        role = "system" if is_system else message.role
        content = self._forms.of(role, _texts(message, place))
        plain: TemplateMessage = {"role": role, "content": content}
        for name in _READ_FIELDS:
            value = getattr(message, name)
            if value is not None:
                plain[name] = value
        return plain

    def _rendering(
        self,
        plain: list[TemplateMessage],
        add_generation_prompt: bool,
        reasoning_effort: str | None = None,
    ) -> Rendering:
        variables = self._special_tokens
        if reasoning_effort is not None:  # else templates choose one
            variables = {**variables, "reasoning_effort": reasoning_effort}
        return Rendering(self._source, variables, plain, add_generation_prompt)


def _put_tag(message: TemplateMessage) -> str:
    """The tag stands behind the message's text, or its last part's, which is returned."""
    holder, key = message, "content"
    if isinstance(message["content"], list):
        holder, key = message["content"][-1], "text"
    text: str = holder[key]
    holder[key] = text + _END_TAG
    return text


def _up_to_tag(text: str, final: str) -> str:
    """The text in front of the tag. Raises ApiError (400) if the template moved the message."""
    # As transformers does it: templates that strip messages strip the tag's space, too, and then
    # the message's own trailing space is not theirs, either.
    place = text.rfind(_END_TAG.rstrip())
    if place < 0 or final.strip() not in text:
        message = (
            "The model's chat template changes the final message. Leave out continue_final_message"
        )
        raise invalid(message, "continue_final_message", code="chat_template_error")
    is_space_kept = text.startswith(_END_TAG, place)
    return text[:place] if is_space_kept else text[:place].rstrip()


def _texts(message: Message, place: int) -> str | list[str]:
    """The text, or those of the parts. Raises ApiError (400) for parts that are none."""
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
    return texts
