"""`livescale testbed demo`: hosts of one machine join a pool, a burst scales over them, one is lost
without a word, and one leaves in order; every token is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec
import yaml

from livescale.cli.loads import write_json
from livescale.common.errors import UserError
from livescale.config.pool import LINEAR_PREFIX
from livescale.lab.client.replay_process import ReplayJob
from livescale.lab.commands.hosts_demo_run import HostsDemo, HostsStory
from livescale.lab.commands.pool_watch import HTTP_PORT
from livescale.lab.commands.scenario import (
    Played,
    TokenChecks,
    checked_tokens,
    make_model_once,
    slo_alone,
)
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec, TestbedError, parse_rate
from livescale.load.traces import TraceRow
from livescale.report.html import write_html_report
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run_report import run_text
from livescale.values.units import NS_PER_S

_HOSTS_MIN = 3
PROMPT_TOKENS = 192
OUTPUT_TOKENS = 64
"""Long enough that streams are under way when their host is lost."""
_BURST_AT_S, _BURST_S = 2.0, 3.0
# What a host had sent before it was cut off may still arrive this long afterwards.
_IN_FLIGHT_NS = 250_000_000
PATIENCE_S = 120.0
_TIMED_RUN_US, _TIMED_TOKEN_US = 15_000, 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = f"Number of emulated hosts with the head node, at least {_HOSTS_MIN}."
    add("--hosts", type=int, default=4, help=words)
    add("--link", default="1gbit", metavar="RATE", help="Rate of every link, each direction.")
    add_load_arguments(parser, seconds=30)
    add("--json", type=Path, metavar="FILE", help="Write the figures to this file (JSON).")
    words = "Folder of record, logs, picture and page (default: runs/hosts-DATE)."
    add("--folder", type=Path, help=words)


def add_load_arguments(parser: argparse.ArgumentParser, *, seconds: int) -> None:
    """The flags of `pool_flags` and `burst_job`."""
    add = parser.add_argument
    words = "Device of the workers (default: cpu)."
    add("--device", choices=("cpu", "timed"), default="cpu", help=words)
    words = "Folder of the model. The command makes a missing model."
    add("--model", type=Path, default=Path("models/demo"), help=words)
    add("--seconds", type=int, default=seconds, help="Duration of the load in seconds.")
    add("--rate", type=float, default=1.5, help="Requests per second beside the burst.")
    add("--burst", type=int, default=80, help=f"Requests of the burst, within {_BURST_S:g} s.")
    words = "Time without a message after which a host is lost."
    add("--lost-after-ms", type=int, default=2000, help=words)
    add("--seed", type=int, default=0, help="Seed of the prompts.")


class NoDemoError(UserError):
    """There can be no such demo here; the message says why."""

    exit_status = 2


def run(arguments: argparse.Namespace) -> int:
    """0 when no request failed, every token is right, and both hosts that went had streams. Raises
    NoDemoError where there can be no such hosts here, and UserError."""
    if arguments.hosts < _HOSTS_MIN:
        raise NoDemoError(
            f"--hosts is {arguments.hosts}, not {_HOSTS_MIN} at least: a head, one host that is"
            " lost and one that leaves"
        )
    check_load(arguments)
    folder = arguments.folder or Path(f"runs/hosts-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = folder.absolute()
    with emulated_hosts(arguments.hosts, arguments.link) as bed:
        make_model_once(arguments.model)
        folder.mkdir(parents=True, exist_ok=True)
        demo = HostsDemo(bed, folder, pool_flags(arguments, folder), PATIENCE_S)
        if demo.record.exists():
            raise UserError(f"{demo.record} is there already: choose another --folder")
        told = f"{len(bed.hosts)} hosts, links of {arguments.link}; {arguments.device} workers"
        print(f"{told}; logs, record and picture: {folder}", flush=True)
        job = burst_job(arguments, arguments.seed)
        story = demo.play(arguments.model.absolute(), job)
    return _judge(arguments, job, story, demo.record)


# -- helpers, in the order used -------------------------------------------------------------------


@contextlib.contextmanager
def emulated_hosts(hosts: int, link: str) -> Iterator[Testbed]:
    """So many, with links of this rate. Raises NoDemoError. A process that is asked to end removes
    them first."""
    signal.signal(signal.SIGTERM, leave)
    with contextlib.ExitStack() as stack:
        try:
            spec = NetworkSpec(hosts, parse_rate(link))
            bed = stack.enter_context(Testbed(spec))
        except TestbedError as error:
            raise NoDemoError(str(error)) from error
        yield bed


def check_load(arguments: argparse.Namespace) -> None:
    """Raises NoDemoError."""
    if min(arguments.seconds, arguments.burst, arguments.lost_after_ms) < 1 or arguments.rate <= 0:
        raise NoDemoError("--seconds, --burst, --lost-after-ms and --rate must be positive")


def leave(number: int, frame: FrameType | None) -> None:
    """End in order, as a handler of a signal."""
    sys.exit(128 + number)


def pool_flags(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Flags of `serve`, with a file in the folder for what is no setting: nothing is loaded before
    the burst asks for it, and what has grown stays until hosts go."""
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump({"tuning": {"spares_ahead": "none", "request_attempts_max": 4}}))
    flags = {
        "config": file,
        "device": arguments.device,
        "lost-after-ms": arguments.lost_after_ms,
        "scale-down-timeout-ms": 60_000,
        "queue-requests-max": _requests(arguments) + 1,
    }
    if arguments.device == "timed":
        flags["timed-profile"] = f"{LINEAR_PREFIX}{_TIMED_RUN_US}:{_TIMED_TOKEN_US}"
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _requests(arguments: argparse.Namespace) -> int:
    burst: int = arguments.burst
    return int(arguments.seconds * arguments.rate) + burst


def burst_job(arguments: argparse.Namespace, seed: int) -> ReplayJob:
    """Steady requests, and a burst among them, with prompts from this seed."""
    steady = int(arguments.seconds * arguments.rate)
    due_s = [number / arguments.rate for number in range(steady)]
    due_s += [_BURST_AT_S + _BURST_S * n / arguments.burst for n in range(arguments.burst)]
    rows = tuple(
        TraceRow(int(at_s * NS_PER_S), PROMPT_TOKENS, OUTPUT_TOKENS) for at_s in sorted(due_s)
    )
    config = msgspec.json.decode((arguments.model / "config.json").read_bytes())
    url = f"http://127.0.0.1:{HTTP_PORT}"
    return ReplayJob(url, arguments.model.name, rows, config["vocab_size"], seed)


def _judge(arguments: argparse.Namespace, job: ReplayJob, story: HostsStory, record: Path) -> int:
    """Check the tokens, tell, draw, and write the figures."""
    slo = slo_alone(job.rows, record)
    played = Played(story.results, story.results[0].scheduled_ns, record)
    run = played.reported("hosts", "a burst", slo, str(slo))
    checks = checked_tokens(arguments.model, story.results, arguments.device)
    figures = _figures(arguments, story, run, checks)
    folder = record.parent
    # Only here: drawing takes a second to import.
    from livescale.report.pictures.host_lanes import host_picture

    title = f"{arguments.hosts} hosts: three join, a burst scales, one is lost, one leaves"
    host_picture(folder / "hosts.svg", run, title)
    write_html_report(folder / "report.html", [run], "A pool over several hosts")
    print(f"\n{run_text(run)}\n\n{checks.text()}")
    print(_closing(figures))
    print(f"seen      {folder}/hosts.svg and {folder}/report.html")
    if arguments.json is not None:
        write_json(arguments.json, figures)
    problems = _problems(figures)
    for problem in problems:
        print(f"not good: {problem}")
    return 1 if problems else 0


def _figures(
    arguments: argparse.Namespace, story: HostsStory, run: ReportedRun, checks: TokenChecks
) -> dict[str, object]:
    """What was not measured is absent."""
    by_host = {host: took / NS_PER_S for host, took in sorted(story.joined_ns.items())}
    figures: dict[str, object] = {
        "hosts": arguments.hosts,
        "joined_s": max(by_host.values()),
        "joined_s_by_host": by_host,
        "requests": run.summary.requests,
        "failed": run.summary.failed,
        "lost_host_streams": len(story.streams),
        "left_host_streams": story.left_streams,
        **checks.as_json(),
    }
    times = {
        "scale_up_s": story.scale_up_ns,
        "silent_loss_noticed_s": story.noticed_ns and story.noticed_ns - story.cut_ns,
        "healed_s": _healed_ns(story),
        "left_s": story.left_ns,
    }
    return figures | {name: ns / NS_PER_S for name, ns in times.items() if ns is not None}


def _healed_ns(story: HostsStory) -> int | None:
    """From the cut until the last of the lost host's streams had its next token."""
    after_ns = story.cut_ns + _IN_FLIGHT_NS
    streams = [r for r in story.results if r.request_id in story.streams and r.ok]
    nexts = [next((at for at in r.token_ns if at > after_ns), None) for r in streams]
    moved = [at for at in nexts if at is not None]
    return max(moved) - story.cut_ns if moved else None


def _closing(figures: Mapping[str, object]) -> str:
    """The figures of the story in words."""
    told = {
        "joined_s": "the slowest host joined after {:.1f} s",
        "scale_up_s": "one instance on each host {:.1f} s after the first decision to grow",
        "silent_loss_noticed_s": "a host that fell silent was given up after {:.1f} s",
        "healed_s": "its streams went on {:.1f} s after the cut at the latest",
        "left_s": "the host that left was let go after {:.1f} s",
    }
    parts = [words.format(figures[name]) for name, words in told.items() if name in figures]
    return "hosts     " + "\n          ".join(parts)


def _problems(figures: Mapping[str, object]) -> list[str]:
    """Why this was no good run."""
    problems = []
    if figures["failed"]:
        problems.append(f"{figures['failed']} requests failed")
    if figures["token_mismatches"]:
        problems.append(f"{figures['token_mismatches']} tokens are wrong")
    if "healed_s" not in figures:
        problems.append("the host that was lost had no stream that went on elsewhere")
    if not figures["left_host_streams"]:
        problems.append("the host that left had no stream")
    return problems
