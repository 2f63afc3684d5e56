"""Chat templates as Jinja runs them: foreign code from a model's directory, in a sandbox.

The sandbox keeps a template from files and from the interpreter, not from running for ever: so this
runs in processes of its own (`render_process.py`), which import nothing else of LiveScale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATES_KEPT = 16


@lru_cache(TEMPLATES_KEPT)
def compiled(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError when the source is not a template."""
    return _environment().from_string(source)


def rendered(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
) -> str:
    """The prompt text. Raises whatever the template does."""
    return compiled(source).render(
        messages=messages,
        tools=None,
        add_generation_prompt=add_generation_prompt,
        **special_tokens,
    )


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
