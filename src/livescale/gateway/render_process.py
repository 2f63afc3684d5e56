"""A process that renders chat templates, one after the other, until its standard input ends.

Templates are foreign code from a model's directory. Jinja's sandbox keeps them from files and from
the interpreter, not from running for ever: so they run here.

It bounds itself: what takes more processor time or memory than a rendering may ends the process,
or the rendering. Its parent sees an answer or the end.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from livescale.gateway.rendering import (
    MEMORY_BYTES_MAX,
    RENDER_S,
    RENDERED_BYTES_MAX,
    Rendered,
    Rendering,
    read_message,
    write_message,
)

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


ERROR_CHARS_MAX = 2000


def main() -> None:
    """Answer every Rendering with a Rendered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway says when it is over
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    decode = msgspec.msgpack.Decoder(Rendering).decode
    while (message := read_message(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        answer = msgspec.msgpack.encode(_answer(decode(message)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(answers, answer)


def _answer(rendering: Rendering) -> Rendered:
    try:
        text = rendered(
            rendering.source,
            rendering.special_tokens,
            rendering.messages,
            rendering.add_generation_prompt,
        )
        if len(text.encode()) > RENDERED_BYTES_MAX:
            return Rendered(error=f"the text is longer than {RENDERED_BYTES_MAX} bytes")
        return Rendered(text)
    except Exception as error:  # foreign code may raise anything
        return Rendered(error=str(error)[:ERROR_CHARS_MAX] or type(error).__name__)


if __name__ == "__main__":
    main()
