"""`livescale COMMAND …`: finds the command, turns expected errors into one clear line.

A command's module is imported only when it runs, so that `livescale --help` needs no torch.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from livescale import __version__
from livescale.cli.errors import UserError

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    help: str

    @property
    def module(self) -> str:
        return f"livescale.cli.{self.name}"


COMMANDS = (
    _Command("serve", "serve models behind an OpenAI-compatible API"),
    _Command("demo", "watch a pool scale 1 -> 3 -> 1, and new instances help while they load"),
    _Command("models", "make models for tests and demos"),
    _Command("bench", "compare with other engines, and with limits"),
    _Command("plan", "plan a multicast and say what it costs"),
    _Command("simulate", "run a trace in virtual time"),
    _Command("capacity", "find the smallest simulated pool that keeps an SLO"),
    _Command("swarm", "run faulty worlds drawn from seeds, and check every rule in each"),
    _Command("reproduce", "what the papers claim, and what comes out here"),
    _Command("report", "what run records say: text, a page, a picture"),
    _Command("replay", "feed records to a fresh controller, or member, and compare"),
    _Command("testbed", "emulate hosts and their links on this machine (root, Linux)"),
)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser; only `command`'s own module is imported (None: no command's)."""
    parser = argparse.ArgumentParser(
        prog="livescale",
        description="Serve many language models on one pool and scale them in a moment.",
    )
    parser.add_argument("--version", action="version", version=f"livescale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for known in COMMANDS:
        sub = commands.add_parser(known.name, help=known.help, description=known.help)
        if known.name == command:
            importlib.import_module(known.module).add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 when all went well, 1 for an error that was explained, 2 for usage."""
    arguments = sys.argv[1:] if argv is None else argv
    names = [command.name for command in COMMANDS]
    chosen = next((word for word in arguments if word in names), None)
    with _interrupted_at_once(chosen):
        parsed = build_parser(chosen).parse_args(arguments)
        module = importlib.import_module(f"livescale.cli.{parsed.command}")
    try:
        code: int = module.run(parsed)
    except UserError as error:
        print(f"livescale {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"livescale {parsed.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


@contextmanager
def _interrupted_at_once(command: str | None) -> Iterator[None]:
    """Ctrl-C while modules are imported: they make other errors of the exception, or hold it for
    one of theirs, and there is nothing to clean up yet."""

    def leave(number: int, frame: FrameType | None) -> None:
        words = " ".join(["livescale", *([command] if command else [])])
        os.write(2, f"{words}: interrupted\n".encode())
        os._exit(_INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
