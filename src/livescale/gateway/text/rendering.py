"""Chat templates are rendered in processes of their own, which can be ended: their two ends.

Templates are foreign code from a model's directory. Jinja's sandbox keeps them from files and from
the interpreter, not from running for ever, and a thread cannot be ended. So this module is also run
as a process, which bounds itself: what takes more processor time or memory than a rendering may
ends the process, or the rendering. The gateway sees an answer or the end, and starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache
from typing import IO

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from livescale.common.interpreter import module_words
from livescale.gateway.text.content_forms import TemplateMessage

RENDERERS_MAX = 4
"""Processes that render at once. They start when they are needed, and then stay."""
RENDER_S = 2
"""Processor time of one rendering: hundreds of times what templates take."""
RENDER_WALL_S = 20.0
"""And the time until it is given up, however busy the machine is."""
RENDERED_BYTES_MAX = 16 * 1024 * 1024
MEMORY_BYTES_MAX = 1024 * 1024 * 1024
"""Address space of a process that renders."""
LENGTH_BYTES = 4
"""Messages of both directions are a length, big-endian, and so much msgpack."""


class Rendering(msgspec.Struct, frozen=True, array_like=True):
    """A template, and what it renders: `messages`, and `variables` by their names in it."""

    source: str
    variables: dict[str, str]
    messages: list[TemplateMessage]
    add_generation_prompt: bool


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The prompt text, or why there is none."""

    text: str = ""
    error: str | None = None


class RenderFailed(Exception):
    """The template raised; the message is its own."""


class RenderTimeout(Exception):
    """The template did not end, or took more memory than there is for one."""


class _Renderer:
    """One process. For one thread at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            module_words("livescale.gateway.text.rendering"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def render(self, rendering: Rendering) -> Rendered | None:
        """None: the process has ended over it."""
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        late = threading.Timer(RENDER_WALL_S, child.kill)
        late.start()
        try:
            write_message(child.stdin, msgspec.msgpack.encode(rendering))
            answer = read_message(child.stdout)
        except BrokenPipeError:
            answer = None
        finally:
            late.cancel()
        return None if answer is None else msgspec.msgpack.decode(answer, type=Rendered)

    def end(self) -> None:
        """End the process at once. Idempotent."""
        child = self._child
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Renderers:
    """The processes of one gateway that render. `close` ends them; so does the garbage collector.

    `render` may be called from any thread.
    """

    def __init__(self) -> None:
        self._idle: list[_Renderer] = []
        self._threads = ThreadPoolExecutor(RENDERERS_MAX, "render")
        weakref.finalize(self, _end_all, self._idle, self._threads)

    async def render_beside(self, rendering: Rendering) -> str:
        """As `render`, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.render, rendering)

    def render(self, rendering: Rendering) -> str:
        """The prompt text. Raises RenderFailed or RenderTimeout."""
        try:
            renderer = self._idle.pop()
        except IndexError:
            renderer = _Renderer()
        answer = renderer.render(rendering)
        if answer is None:
            renderer.end()
            raise RenderTimeout(f"it did not end within {RENDER_S} s of processor time")
        self._idle.append(renderer)
        if answer.error is not None:
            raise RenderFailed(answer.error)
        return answer.text

    def close(self) -> None:
        """End all processes that render nothing now. Idempotent."""
        _end_all(self._idle, self._threads)

    def __repr__(self) -> str:
        return f"<Renderers, {len(self._idle)} idle>"


def write_message(pipe: IO[bytes], message: bytes) -> None:
    """Raises BrokenPipeError."""
    pipe.write(len(message).to_bytes(LENGTH_BYTES, "big"))
    pipe.write(message)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes | None:
    """None at the end, also in the middle of a message."""
    head = pipe.read(LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    if len(head) < LENGTH_BYTES or length > 2 * RENDERED_BYTES_MAX:
        return None
    message = pipe.read(length)
    return message if len(message) == length else None


def _end_all(idle: list[_Renderer], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    while idle:
        idle.pop().end()


# -- the process -----------------------------------------------------------------------------------

TEMPLATES_KEPT = 16


@lru_cache(TEMPLATES_KEPT)
def compiled(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError when the source is not a template."""
    return _environment().from_string(source)


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process
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
        text = compiled(rendering.source).render(
            messages=rendering.messages,
            tools=None,
            documents=None,
            add_generation_prompt=rendering.add_generation_prompt,
            **rendering.variables,
        )
        if len(text.encode()) > RENDERED_BYTES_MAX:
            return Rendered(error=f"the text is longer than {RENDERED_BYTES_MAX} bytes")
        return Rendered(text)
    except Exception as error:  # foreign code may raise anything
        return Rendered(error=str(error)[:ERROR_CHARS_MAX] or type(error).__name__)


if __name__ == "__main__":
    main()
