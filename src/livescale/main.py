"""`livescale COMMAND …`: finds the command, turns expected errors into one clear line.

A command's module is imported only when it runs, so that `livescale --help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

from livescale import __version__
from livescale.common.errors import UserError

_INTERRUPTED = 130


COMMANDS = {
    "serve": "serve models behind an OpenAI-compatible API",
    "join": "give this machine's devices to a pool that is served on another one",
    "gateway": "one more HTTP endpoint of a pool that is served on another machine",
    "cluster": "certificates for the machines of a pool, and what this machine says of itself",
    "demo": "watch a pool scale 1 -> 3 -> 1, and new instances help while they load",
    "top": "what the models of a running pool do now, and each of their stages",
    "models": "make models for tests and demos",
    "bench": "compare with other engines, and with limits",
    "plan": "plan a multicast and say what it costs",
    "simulate": "run a trace in virtual time",
    "capacity": "find the smallest simulated pool that keeps an SLO",
    "swarm": "run faulty worlds drawn from seeds, and check every rule in each",
    "reproduce": "what the papers claim, and what comes out here",
    "report": "what run records say: text, a page, a picture",
    "replay": "feed records to a fresh controller, or member, and compare",
    "testbed": "emulate hosts and their links on this machine (root, Linux)",
}
"""Each command with its help."""
_LABORATORY = {
    "demo": "livescale.lab.commands.demo",
    "bench": "livescale.lab.commands.bench.bench",
    "simulate": "livescale.lab.commands.simulate",
    "capacity": "livescale.lab.commands.capacity",
    "swarm": "livescale.lab.commands.swarm",
    "reproduce": "livescale.lab.commands.reproduce",
    "testbed": "livescale.lab.commands.testbed",
}
"""Modules of the commands that are no part of the product."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser; only `command`'s own module is imported (None: no command's)."""
    parser = argparse.ArgumentParser(
        prog="livescale",
        description="Serve many language models on one pool and scale them in a moment.",
    )
    parser.add_argument("--version", action="version", version=f"livescale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        sub = commands.add_parser(name, help=words, description=words, add_help=False)
        sub.add_argument(
            *("-h", "--help"),
            action=_Help,
            nargs="?",
            choices=("all",),
            metavar="all",
            help="this text",
        )
        if name == command:
            _module(name).add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 when all went well, 1 for an error that was explained, 2 for usage, and
    where a machine could not join a pool."""
    arguments = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in arguments if word in COMMANDS), None)
    with _interrupted_at_once(chosen):
        parsed = build_parser(chosen).parse_args(arguments)
        module = _module(parsed.command)
    try:
        code: int = module.run(parsed)
    except UserError as error:
        print(f"livescale {parsed.command}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"livescale {parsed.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


class _Help(argparse.Action):
    """A command whose help leaves something out has the rest as the default `whole_help`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        whole = parser.get_default("whole_help")
        if values == "all" and whole is not None:
            parser.epilog = whole()
        parser.print_help()
        parser.exit()


def _module(command: str) -> ModuleType:
    if command in _LABORATORY:
        return importlib.import_module(_LABORATORY[command])
    return importlib.import_module(f"livescale.cli.{command}")


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
