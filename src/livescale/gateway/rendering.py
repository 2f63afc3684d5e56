"""Chat templates are rendered in processes of their own, which can be ended.

A thread cannot: a template that loops would hold the interpreter for ever. A process that takes too
long, or too much memory, ends; the next rendering starts another one.
"""

import asyncio
import contextlib
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import msgspec

from livescale.interpreter import module_words

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
    """A template, and what it renders. `messages` have role, content and perhaps a name."""

    source: str
    special_tokens: dict[str, str]
    messages: list[dict[str, str]]
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
            module_words("livescale.gateway.render_process"),
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
