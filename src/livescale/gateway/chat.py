"""Chat templates: messages in, the prompt text the model was trained on out.

A template is foreign code from the model's directory, so it runs in Jinja's immutable sandbox.
No tokenization here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from livescale.gateway.errors import invalid
from livescale.gateway.schema import Message


class ChatTemplate:
    """A model's chat template with its special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError when the source is not a template."""
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template in `directory` (chat_template.jinja, else tokenizer_config.json), if any.

        Raises ValueError, naming the file, when it cannot be read.
        """
        config = _read_tokenizer_config(directory / "tokenizer_config.json")
        path = directory / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else _template_in(config)
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {directory} is not valid: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text, generation prompt added. Raises ApiError (400) if it refuses."""
        plain = [_plain(message, place) for place, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=plain, tools=None, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:
            # Foreign code: whatever it raises (its own refusal, a TypeError over a role it does
            # not know) is about these messages.
            message = f"The model's chat template does not accept these messages: {error}"
            raise invalid(message, "messages", code="chat_template_error") from error


def _plain(message: Message, place: int) -> dict[str, str]:
    """The message as templates expect it: text parts joined, `developer` as `system`."""
    if message.tool_calls:
        raise invalid(
            "Tool calls are not supported", f"messages[{place}].tool_calls", "unsupported_parameter"
        )
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _text(message, place)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(message: Message, place: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise invalid(
                "Only content parts of the form {'type': 'text', 'text': ...} are supported",
                f"messages[{place}].content",
                "unsupported_content",
            )
        texts.append(part.text)
    return "\n".join(texts)


def _read_tokenizer_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return config


def _template_in(config: dict[str, object]) -> str | None:
    """The configured template; of several named ones the `default`."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """`bos_token` and its like: plain strings, or objects with `content`."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for (transformers' conventions)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would end up in the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
