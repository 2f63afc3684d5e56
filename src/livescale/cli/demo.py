"""`livescale demo`: a burst meets a pool of three warm workers; watch it scale 1 -> 3 -> 1. Then a
burst of long prompts, with and without live scaling."""

import argparse
import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from livescale.cli.demo_live import play_live
from livescale.cli.demo_run import DemoRun, TokenChecks, check_tokens, slo_rule
from livescale.cli.errors import UserError
from livescale.cli.loads import Load, add_load_arguments, choose_load, write_json
from livescale.config import PoolConfig
from livescale.config_reading import add_flags, given_flags, load_config
from livescale.engine.errors import ModelError
from livescale.engine.make import make_model
from livescale.report.run_report import RunReport
from livescale.runtime.supervisor import PoolFailed
from livescale.settings import ConfigError
from livescale.traces import TraceError, clip

_PRESET = "medium"
# How long the pool may take to shrink again after the last request.
_SHRINK_S = 30.0
# Where lengths must be clipped, this part of the model's limit is for the output.
_OUTPUT_PART = 4
PARTS = ("scaling", "live")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/demo-100mb"), help="directory")
    add("--only", choices=PARTS, help="1 -> 3 -> 1, or with and without live scaling")
    add_load_arguments(parser, trace=None, seconds=45, divide_lengths=16)
    add("--load-seconds", type=float, default=1.0, help="time that a load takes in the first part")
    words = "time that a load takes in the second part"
    add("--live-load-seconds", type=float, default=5.0, help=words)
    add("--json", type=Path, help="write the figures to this file")
    words = "of records, pictures and the page (default: runs/demo-DATE)"
    add("--folder", type=Path, help=words)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing failed, every token is right and the pool came back to one instance."""
    folder = arguments.folder or Path(f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    figures: dict[str, object] = {}
    is_good = True
    try:
        if min(arguments.load_seconds, arguments.live_load_seconds) <= 0:
            raise UserError("--load-seconds and --live-load-seconds must be positive")
        _make_model_once(arguments.model)
        if arguments.only != "live":
            scaled = _play_scaling(arguments, folder)
            print(f"\n{scaled.text()}")
            figures |= scaled.as_json()
            is_good = scaled.is_good
        if arguments.only != "scaling":
            live = play_live(arguments, folder)
            print(f"\n{live.text()}")
            figures["live"] = live.as_json()
            is_good = is_good and live.is_good
    except (ConfigError, ModelError, PoolFailed, TraceError) as error:
        raise UserError(str(error)) from error
    if arguments.json is not None:
        write_json(arguments.json, figures)
    return 0 if is_good else 1


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A run of the demo, judged."""

    report: RunReport
    checks: TokenChecks
    record: Path

    @property
    def is_good(self) -> bool:
        is_small_again = self.report.instances[-1][1] == 1
        return self.report.summary.failed == 0 and self.checks.wrong == 0 and is_small_again

    def as_json(self) -> dict[str, object]:
        return {**self.report.as_json(), **self.checks.as_json(), "record": str(self.record)}

    def text(self) -> str:
        return (
            f"{self.report.text()}\n{self.checks.text()}\n"
            f"record    {self.record} (check it with: livescale replay {self.record})"
        )


# -- helpers, in the order used -------------------------------------------------------------------


def _make_model_once(directory: Path) -> None:
    if not directory.exists():
        print(f"making a model of about 100 MB in {directory} …", flush=True)
        make_model(directory, _PRESET)


def _play_scaling(arguments: argparse.Namespace, folder: Path) -> _Outcome:
    load = choose_load(arguments)
    config = _choose_config(arguments, load, folder / "scaling.jsonl")
    run = DemoRun(config)
    print(run.describe(), flush=True)
    load = _clipped(load, run.request_tokens_max)

    async def play() -> _Outcome:
        async with run.pool():
            print(f"ready: {run.base_url}/v1; replaying {arguments.seconds} s", flush=True)
            played = await run.play(load.rows, seed=arguments.seed)
            await run.until_small(_SHRINK_S)
        print("checking every token against transformers …", flush=True)
        return _Outcome(
            report=played.report(load.name, slo_rule(config), config.slo),
            checks=check_tokens(arguments.model, played.results),
            record=played.record,
        )

    return asyncio.run(play())


def _choose_config(arguments: argparse.Namespace, load: Load, record: Path) -> PoolConfig:
    """The settings of the first part, where the user did not choose others."""
    size_bytes = sum(file.stat().st_size for file in arguments.model.glob("*.safetensors"))
    rate = max(1 << 20, int(size_bytes / arguments.load_seconds))
    chosen: dict[str, object] = {
        "port": 0,
        "hosts": 3,
        "uplink_bytes_per_s": rate,
        "downlink_bytes_per_s": rate,
        "queue_requests_max": len(load.rows) + 1,
        "record": str(record),
    }
    given = given_flags(arguments)
    return load_config(None, [str(arguments.model)], os.environ, {**chosen, **given})


def _clipped(load: Load, request_tokens_max: int) -> Load:
    """Shorten requests that the model cannot take, and say how many."""
    output_max = request_tokens_max // _OUTPUT_PART
    rows, clipped = clip(load.rows, request_tokens_max - output_max, output_max)
    if clipped:
        print(f"{clipped} requests were longer than the model's limit and are clipped to it")
    return Load(load.name, rows)
