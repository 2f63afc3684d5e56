"""`livescale COMMAND …`: finds the command, turns expected errors into one clear line.

A command's module is imported only when it runs, so that `livescale --help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

from livescale import __version__
from livescale.common.errors import UserError
from livescale.common.help_format import Parser

_INTERRUPTED = 130


COMMANDS = {
    "serve": "Serve models behind an OpenAI-compatible API.",
    "join": "Join this node's devices to a pool.",
    "gateway": "Run another HTTP gateway of a pool.",
    "cluster": "Make certificates for the nodes of a pool, and show the hardware of this node.",
    "demo": "Show a pool that scales 1 -> 3 -> 1, and live scaling beside stop-the-world.",
    "top": "Show the load of a running pool, by model and stage.",
    "models": "Make test models, and publish, change, list or remove models of a running pool.",
    "bench": "Run a benchmark.",
    "plan": "Plan a multicast and predict its time.",
    "simulate": "Simulate a pool on a trace, in virtual time.",
    "capacity": "Find the smallest simulated pool that meets an SLO.",
    "swarm": "Simulate pools with random faults and check every invariant.",
    "reproduce": "Compare claims of the papers with results of this implementation.",
    "report": "Report on run records, as text, an HTML page or a picture.",
    "replay": "Replay records through a controller or worker and compare the decisions.",
    "testbed": "Emulate hosts and links on this node (root, Linux).",
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
    parser = Parser(
        prog="livescale",
        description="Serve many language models on one pool, with live scaling.",
    )
    parser.add_argument("--version", action="version", version=f"livescale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        sub = commands.add_parser(name, help=words, description=words, add_help=False)
        sub.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            choices=("all",),
            metavar="all",
            help="Show help. With all, show every setting.",
        )
        if name == command:
            _module(name).add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 when all went well, 1 for an error that was explained, 2 for usage, and
    where a machine could not join a pool."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal has every character, and none of ours is worth a traceback.
        sys.stdout.reconfigure(errors="replace")
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
