"""`livescale bench attacks`: the flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from livescale.bench.attacks import AttacksBenchOptions, run_attacks
from livescale.cli.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, AttacksBenchOptions()
    words = "an attack by its name or a part of it (default: all)"
    add("--attack", action="append", default=[], metavar="NAME", help=words)
    words = "windows alone and windows beside, of each attack"
    add("--rounds", type=int, default=defaults.rounds, metavar="N", help=words)
    add("--seconds", type=float, default=defaults.seconds, metavar="S", help="of a window")
    words = "hostile requests per second"
    add("--attack-rate", type=float, default=defaults.attack_rate, metavar="N", help=words)
    words = "hostile connections that are open at a time, at most"
    add("--connections", type=int, default=defaults.connections, metavar="N", help=words)
    words = "requests per second of the light client"
    add("--light-rate", type=float, default=defaults.light_rate, metavar="N", help=words)
    words = "length of the light client's prompts"
    add("--prompt-tokens", type=int, default=defaults.prompt_tokens, metavar="N", help=words)
    add("--seed", type=int, default=defaults.seed, help="of the light client's prompts")
    add("--json", type=Path, help="write the figures to this file")


def run(arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """The figures, and whether all attacks stayed within the bounds. Raises UserError."""
    for name in ("rounds", "seconds", "attack_rate", "connections", "light_rate", "prompt_tokens"):
        if getattr(arguments, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be positive")
    options = AttacksBenchOptions(
        attacks=tuple(arguments.attack),
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        attack_rate=arguments.attack_rate,
        connections=arguments.connections,
        light_rate=arguments.light_rate,
        prompt_tokens=arguments.prompt_tokens,
        seed=arguments.seed,
    )
    report = run_attacks(options, lambda line: print(line, flush=True))
    print()
    print(report.text())
    return report.as_json(), report.is_good
