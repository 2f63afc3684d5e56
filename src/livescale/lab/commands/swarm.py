"""`livescale swarm`: many small faulty worlds in virtual time, each drawn from a seed.

The production Controller and Batcher run in every one of them; a broken rule makes a seed a
failing seed, and the seed is the bug report.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from livescale.cli.loads import write_json
from livescale.common.errors import UserError
from livescale.common.interpreter import spawning
from livescale.sim.base.config import SimConfig
from livescale.sim.swarm.seeds import SeedOutcome, draw_world, run_seed

_PROGRESS_LINES = 10
_CHUNK_SEEDS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, default=1000, help="Number of seeds.")
    add("--first", type=int, default=0, metavar="SEED", help="First seed.")
    words = "Run one seed, and print its world and its failure."
    add("--seed", type=int, metavar="ONE", help=words)
    words = "Count only worlds in which a second controller takes over while the first still runs."
    add("--takeovers", action="store_true", help=words)
    words = "Count only worlds with a model in stages."
    add("--stages", action="store_true", help=words)
    add("--jobs", type=int, default=2, help="Number of processes.")
    add("--json", type=Path, metavar="FILE", help="Write the figures to this file (JSON).")


def run(arguments: argparse.Namespace) -> int:
    """0 when no rule broke, 1 when one did, 130 when interrupted before any did."""
    if arguments.seeds < 1 or arguments.jobs < 1:
        raise UserError("--seeds and --jobs must be at least 1")
    kinds = [has for name, has in _KINDS.items() if getattr(arguments, name)]
    seeds = _seeds(arguments.first, arguments.seeds, kinds)
    if arguments.seed is not None:
        seeds = [arguments.seed]
        _print_world(arguments.seed)
    tally = _Tally(seeds, is_alone=arguments.seed is not None)
    was_interrupted = False
    with _outcomes(seeds, arguments.jobs) as outcomes:
        try:
            tally.count(outcomes)
        except KeyboardInterrupt:
            was_interrupted = True
    print(tally.text() + (", interrupted" if was_interrupted else ""))
    print(tally.requests_text())
    if arguments.json is not None:
        write_json(arguments.json, tally.as_json())
    if tally.failing:
        return 1
    return 130 if was_interrupted else 0


# -- helpers, in the order used -------------------------------------------------------------------


def _has_stages(config: SimConfig) -> bool:
    return any(policy.spec.stage is not None for policy in config.policies)


_KINDS: dict[str, Callable[[SimConfig], bool]] = {
    "takeovers": lambda config: config.faults.takeovers > 0,
    "stages": _has_stages,
}
"""What worlds may be counted by alone: the name of the flag, and which worlds are of the kind."""


def _seeds(first: int, count: int, kinds: Sequence[Callable[[SimConfig], bool]]) -> list[int]:
    """So many seeds, in their order; only those whose worlds are of these kinds."""
    if not kinds:
        return list(range(first, first + count))
    worlds = ((seed, draw_world(seed).config) for seed in itertools.count(first))
    found = (seed for seed, config in worlds if all(has(config) for has in kinds))
    return list(itertools.islice(found, count))


class _Tally:
    """Counts what came of the seeds, and says so while they run."""

    def __init__(self, seeds: Sequence[int], is_alone: bool) -> None:
        self.failing: list[int] = []
        self._seeds = seeds
        self._is_alone = is_alone
        self._done = 0
        self._counts = Counter(
            events=0, requests=0, failed=0, failed_unexplained=0, worlds_above_tenth_failed=0
        )
        self._started_s = time.monotonic()

    def count(self, outcomes: Iterable[SeedOutcome]) -> None:
        every = max(len(self._seeds) // _PROGRESS_LINES, 1)
        for outcome in outcomes:
            self._done += 1
            self._counts.update(
                events=outcome.events,
                requests=outcome.requests,
                failed=outcome.failed,
                failed_unexplained=outcome.is_unexplained,
                worlds_above_tenth_failed=outcome.failed * 10 > outcome.requests,
            )
            if outcome.error:
                self.failing.append(outcome.seed)
                self._tell(outcome)
            if self._done % every == 0 and self._done < len(self._seeds):
                print(self.text(), flush=True)

    def _tell(self, outcome: SeedOutcome) -> None:
        print(f"seed {outcome.seed} fails: {outcome.error}", flush=True)
        if self._is_alone:
            print(outcome.trace, end="", flush=True)
        else:
            print(f"  again: livescale swarm --seed {outcome.seed}", flush=True)

    def text(self) -> str:
        elapsed_s = time.monotonic() - self._started_s
        return (
            f"{self._done} of {len(self._seeds)} seeds, {len(self.failing)} violations,"
            f" {self._counts['events']} events, {elapsed_s:.1f} s"
        )

    def requests_text(self) -> str:
        """How many requests failed, as they had to or not."""
        return (
            "{failed} of {requests} requests failed, {failed_unexplained} without need;"
            " more than a tenth of them in {worlds_above_tenth_failed} worlds"
        ).format_map(self._counts)

    def as_json(self) -> dict[str, object]:
        return {
            "seeds": self._done,
            "violations": len(self.failing),
            "first": self._seeds[0],
            "failing": self.failing,
            **self._counts,
            "seconds": round(time.monotonic() - self._started_s, 3),
        }


def _print_world(seed: int) -> None:
    """Everything that was drawn, one setting per line."""
    world = draw_world(seed)
    settings = msgspec.to_builtins(world.config)
    for model, rows in world.rows.items():
        print(f"load of {model}: {len(rows)} requests")
    for part in ("controller", "faults"):
        for name, value in settings.pop(part).items():
            print(f"{part}.{name}: {value}")
    for name, value in settings.items():
        print(f"{name}: {value}")


@contextmanager
def _outcomes(seeds: Sequence[int], jobs: int) -> Iterator[Iterable[SeedOutcome]]:
    """What comes of the seeds, in their order."""
    if min(jobs, len(seeds)) == 1:
        yield map(run_seed, seeds)
        return
    # Fresh interpreters: what a parent had imported or set makes no difference to a seed. They
    # leave the interruption to the parent, which tells how far it came.
    context = spawning()
    with context.Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield pool.imap(run_seed, seeds, _CHUNK_SEEDS)
