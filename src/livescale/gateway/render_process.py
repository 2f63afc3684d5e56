"""A process that renders chat templates, one after the other, until its standard input ends.

It bounds itself: what takes more processor time or memory than a rendering may ends the process,
or the rendering. Its parent sees an answer or the end.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import msgspec

from livescale.gateway.rendering import (
    MEMORY_BYTES_MAX,
    RENDER_S,
    RENDERED_BYTES_MAX,
    Rendered,
    Rendering,
    read_message,
    write_message,
)
from livescale.gateway.templates import rendered

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
