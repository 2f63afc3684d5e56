"""`livescale models …`: make an ordinary Hugging Face directory without a network, and tell a
running pool which models it has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.cli import model_calls
from livescale.cli.errors import UserError
from livescale.engine.errors import ModelError
from livescale.engine.make import FAMILY_NAMES, PRESETS, make_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("make", help="write a model with seeded random weights")
    make.add_argument("directory", type=Path, metavar="DIR")
    make.add_argument("--preset", choices=sorted(PRESETS), default="small", help="size")
    make.add_argument(
        "--family", choices=sorted(FAMILY_NAMES), default="llama", help="architecture"
    )
    make.add_argument("--seed", type=int, default=0, help="seed of the weights")
    model_calls.add_arguments(actions)


def run(arguments: argparse.Namespace) -> int:
    return _make(arguments) if arguments.action == "make" else model_calls.run(arguments)


def _make(arguments: argparse.Namespace) -> int:
    try:
        make_model(arguments.directory, arguments.preset, arguments.seed, family=arguments.family)
    except (ModelError, OSError) as error:
        raise UserError(str(error)) from error
    size = sum(file.stat().st_size for file in arguments.directory.glob("*.safetensors"))
    print(
        f"{arguments.directory}: {arguments.family}, preset {arguments.preset},"
        f" {size / 1e6:.1f} MB of parameters"
    )
    return 0
