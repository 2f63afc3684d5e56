"""`livescale bench ray`: its flags, and its figures."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from livescale.common.errors import UserError
from livescale.config.ray import NO_RAY, has_ray
from livescale.lab.commands.bench.bench_flags import Bench, finish
from livescale.lab.commands.bench.ray_bench_run import LOSSES, LossStory, RayBenchRun, RayStory
from livescale.lab.commands.hosts_demo import (
    PATIENCE_S,
    NoDemoError,
    add_load_arguments,
    burst_job,
    check_load,
    emulated_hosts,
    pool_flags,
)
from livescale.lab.commands.scenario import TokenChecks, checked_tokens, make_model_once
from livescale.lab.testbed.ray_cluster import RayCluster
from livescale.lab.testbed.spec import TestbedError
from livescale.report.run.terminal import table
from livescale.values.units import NS_PER_S

_HOSTS_MIN = 2
_LINK = "10gbit"
_PACKAGES = ("livescale", "ray", "torch")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = f"Ray nodes beside the head node, at least {_HOSTS_MIN}."
    add("--hosts", type=int, default=3, help=words)
    add_load_arguments(parser, seconds=12)
    words = "Longest allowed pause of a stream after a host is lost, in seconds."
    add("--pause-s-max", type=float, default=6.0, metavar="SECONDS", help=words)
    words = "Time limit for Ray to report a lost node."
    add("--ray-patience-s", type=float, default=120.0, metavar="SECONDS", help=words)
    add("--folder", type=Path, help="Folder of record and logs (default: runs/ray-DATE).")


def _ray(arguments: argparse.Namespace) -> int:
    """Run a pool on an emulated Ray cluster and measure recovery from a lost host (root).

    0 when nothing failed, tokens were right, streams went on in time, and no process was left.
    """
    if arguments.hosts < _HOSTS_MIN:
        raise NoDemoError(f"--hosts is {arguments.hosts}, not {_HOSTS_MIN} at least: one is lost")
    if arguments.pause_s_max <= 0 or arguments.ray_patience_s <= 0:
        raise NoDemoError("--pause-s-max and --ray-patience-s must be positive")
    check_load(arguments)
    if not has_ray():
        raise NoDemoError(NO_RAY)
    folder = arguments.folder or Path(f"runs/ray-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = folder.absolute()
    if (folder / "ray.jsonl").exists():
        raise UserError(f"{folder / 'ray.jsonl'} is there already: choose another --folder")
    with emulated_hosts(arguments.hosts, _LINK) as bed:
        make_model_once(arguments.model)
        folder.mkdir(parents=True, exist_ok=True)
        told = f"{arguments.hosts} raylets beside the head's, {arguments.device} workers"
        print(f"{told}; logs and record: {folder}", flush=True)
        with _clustered(RayCluster(bed, folder)) as cluster:
            limits = PATIENCE_S, arguments.ray_patience_s
            run = RayBenchRun(cluster, folder, pool_flags(arguments, folder), *limits)
            jobs = [burst_job(arguments, arguments.seed + n) for n in range(len(LOSSES))]
            story = run.play(arguments.model.absolute(), jobs)
    checks = checked_tokens(arguments.model, story.results, arguments.device)
    report = RayReport(arguments.hosts, arguments.pause_s_max, story, run.record, checks)
    return finish(report, arguments, _PACKAGES, is_good=not report.problems())


@contextmanager
def _clustered(cluster: RayCluster) -> Iterator[RayCluster]:
    """Raises NoDemoError where there can be no such cluster."""
    try:
        with cluster:
            yield cluster
    except TestbedError as error:
        raise NoDemoError(str(error)) from error


@dataclass(frozen=True)
class RayReport:
    """What was measured; what was not is absent."""

    hosts: int
    pause_s_max: float
    story: RayStory
    record: Path
    checks: TokenChecks

    @cached_property
    def losses(self) -> dict[str, dict[str, float]]:
        """The figures of each, by its name."""
        return {loss.kind.name: self._loss(loss) for loss in self.story.losses}

    def text(self) -> str:
        """A line for each loss, and what was not good."""
        columns = {
            "noticed": "noticed_s",
            "healed": "healed_s",
            "longest pause": "longest_pause_s",
            "Ray: actor": "ray_actor_noticed_s",
            "Ray: node": "ray_node_noticed_s",
            "back": "back_s",
        }
        rows = [
            [name.replace("_", " "), found["streams"], *map(found.get, columns.values())]
            for name, found in self.losses.items()
        ]
        told = table(["what happened", "streams", *(f"{name} s" for name in columns)], rows)
        problems = [f"not good: {problem}" for problem in self.problems()]
        return "\n".join([told, "", self.checks.text(), *problems])

    def as_json(self) -> dict[str, object]:
        by_host = {host: ns / NS_PER_S for host, ns in sorted(self.story.joined_ns.items())}
        silent = self.losses["node_silent"]
        healed = [found["healed_s"] for found in self.losses.values() if "healed_s" in found]
        figures: dict[str, object] = {
            "hosts": self.hosts,
            "joined_s": max(by_host.values()),
            "joined_s_by_host": by_host,
            "requests": len(self.story.results),
            "failed": sum(not result.ok for result in self.story.results),
            **self.checks.as_json(),
            "silent_loss_noticed_s": silent["noticed_s"],
            "healed_s": max(healed, default=None),
            "ray_noticed_s": silent.get("ray_noticed_s"),
            "processes_left": len(self.story.left),
            "losses": self.losses,
        }
        if self.story.scale_up_ns is not None:
            figures["scale_up_s"] = self.story.scale_up_ns / NS_PER_S
        return {name: value for name, value in figures.items() if value is not None}

    def problems(self) -> list[str]:
        """Why this was no good run."""
        problems = [f"a process is left: {process}" for process in self.story.left]
        failed = sum(not result.ok for result in self.story.results)
        if failed:
            problems.append(f"{failed} requests failed")
        if self.checks.wrong:
            problems.append(f"{self.checks.wrong} tokens are wrong")
        for loss in self.story.losses:
            found, words = self.losses[loss.kind.name], loss.kind.name.replace("_", " ")
            if loss.kind.is_at_once and "healed_s" not in found:
                problems.append(f"{words}: no stream of the host went on elsewhere")
            pause_s = found.get("longest_pause_s", 0.0)
            if pause_s > self.pause_s_max:
                problems.append(
                    f"{words}: a stream of the host had no token for {pause_s:.1f} s, the aim is"
                    f" {self.pause_s_max:g} s"
                )
        return problems

    def _loss(self, loss: LossStory) -> dict[str, float]:
        healed = loss.healed_ns(self.record)
        times = {
            "noticed_s": loss.noticed_ns - loss.struck_ns,
            "healed_s": max(healed, default=None),
            "longest_pause_s": loss.longest_pause_ns(),
            "back_s": None if loss.back_ns is None else loss.back_ns - loss.struck_ns,
        }
        ray = {f"ray_{state}_noticed_s": at - loss.struck_ns for state, at in loss.ray_ns.items()}
        if ray:
            ray["ray_noticed_s"] = min(ray.values())
        counts = {"streams": len(loss.streams), "streams_moved": len(healed)}
        found = {name: ns / NS_PER_S for name, ns in (times | ray).items() if ns is not None}
        return counts | found


RAY = Bench(_add_arguments, _ray)
