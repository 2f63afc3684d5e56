"""`livescale bench kv` on emulated hosts: a head and three hosts in network namespaces, each with
nothing but the public commands in it, and a client beside the head.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from livescale.common.interpreter import module_words
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import pool_document
from livescale.lab.bench.base.token_checks import Output, wrong_timed_tokens
from livescale.lab.bench.hosts.host_commands import ended_with
from livescale.lab.bench.kv.kv import (
    INTERFERING,
    PLANNED,
    SHARED,
    KvReport,
    KvRuns,
    checked_play,
)
from livescale.lab.bench.kv.kv_figures import KvPlay, read_play
from livescale.lab.bench.kv.kv_scene import (
    MODEL,
    RUN_TOKENS_MAX,
    RUN_US,
    WORKERS,
    KvScene,
    RolesWanted,
    SecondTokenScene,
)
from livescale.lab.bench.kv.kv_second_tokens import read_second_tokens
from livescale.lab.client.replay_process import ReplayJob
from livescale.lab.client.replayer import ReplayResult
from livescale.lab.commands.pool_watch import HTTP_PORT, PoolWatch
from livescale.lab.testbed.bed import Testbed
from livescale.telemetry.record.record import read_record
from livescale.values.types import Manifest

HOSTS = WORKERS + 1
"""The head's among them."""
_PATIENCE_S = 90.0
_END_S = 60.0
_SEED = 1
# Without any rate plans would go by what probes show, and read from the one that looks faster.
_UNBOUND_FACTOR = 10
_URL = f"http://127.0.0.1:{HTTP_PORT}"


def run_emulated(
    bed: Testbed,
    folder: Path,
    directory: Path,
    manifest: Manifest,
    report: KvReport,
    say: Callable[[str], None],
) -> KvReport:
    """The report, with what processes in the hosts of `bed` did: both plans, and the one that
    interferes once more with rates that bind nothing: there the kernel shares links out; then
    second tokens. Raises UserError."""
    scene, short = report.scene, SecondTokenScene.beside(report.scene)
    plays: dict[str, KvPlay] = {}
    outputs: list[Output] = []
    vocabulary = json.loads(manifest.config_json)["vocab_size"]
    for plan, behind in ((PLANNED, ""), (INTERFERING, ""), (INTERFERING, SHARED)):
        name = plan + behind
        say(f"emulated: {name.replace('_', ', ')} plan …")
        pool = _KvPool(bed, folder / name, _settings(scene, plan, is_bound=not behind))
        results = pool.play(directory, scene, vocabulary)
        play = checked_play(plan, read_play(read_record(pool.record)))
        plays[name] = replace(play, **_counted(results, outputs))
    say("emulated: second tokens …")
    pool = _KvPool(bed, folder / "second_tokens", _settings(short, PLANNED, is_bound=True))
    counts = _counted(pool.play(directory, short, vocabulary), outputs)
    ahead = replace(read_second_tokens(short, read_record(pool.record)), **counts)
    return replace(
        report,
        emulated=KvRuns(plays, "unbound_tbt_p99_ratio", ahead),
        tokens=sum(len(token_ids) for _, token_ids in outputs),
        wrong_tokens=sum(wrong_timed_tokens(manifest, outputs)),
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _counted(results: Sequence[ReplayResult], outputs: list[Output]) -> dict[str, Any]:
    """As the client saw requests; their tokens are added to what is to be judged."""
    outputs += [(result.prompt_ids, result.token_ids) for result in results]
    return {"requests": len(results), "failed": sum(not result.ok for result in results)}


def _settings(scene: KvScene, plan: str, *, is_bound: bool) -> dict[str, object]:
    """Nothing is loaded ahead, kept or worked on while it loads, and no host keeps a copy: what
    crosses links is KV, and the parameters that are measured."""
    rate = scene.bytes_per_s * (1 if is_bound else _UNBOUND_FACTOR)
    return {
        "workers": 0,
        "device": "timed",
        "timed_run_us": RUN_US,
        "timed_token_us": scene.token_us,
        "run_tokens_max": RUN_TOKENS_MAX,
        "uplink_bytes_per_s": rate,
        "downlink_bytes_per_s": rate,
        "host_memory_bytes": 0,
        "placement": "none",
        "warm_spares": "off",
        "spares_ahead": "none",
        "live_order": "stop-the-world",
        "serving_links": "avoid" if plan == PLANNED else "ignore",
    }


def _roles(wanted: RolesWanted) -> dict[str, object]:
    counts = {"prefill": wanted.prefill, "decode": wanted.decode}
    return {name: {"min_replicas": n, "max_replicas": n} for name, n in counts.items()}


class _KvPool:
    """One pool, on a bed whose first host is the head; `folder` is made, and gets its record and
    logs."""

    def __init__(self, bed: Testbed, folder: Path, settings: Mapping[str, object]) -> None:
        folder.mkdir()
        self.record = folder / "kv.jsonl"
        self._bed = bed
        self._folder = folder
        self._settings = settings
        self._watch = PoolWatch(bed, self.record, _PATIENCE_S)

    def play(self, directory: Path, scene: KvScene, vocabulary: int) -> list[ReplayResult]:
        """What the client got. Raises UserError."""
        head = self._bed.hosts[0].name
        ending = ended_with(self._watch.commands, head, _END_S)
        # The client is there before the pool: its start is no part of the scene.
        with ending, self._watch.client(head) as client:
            self._start(directory)
            began_ns = time.monotonic_ns()
            job = ReplayJob(_URL, MODEL, tuple(scene.rows()), vocabulary, _SEED)
            client.send(msgspec.to_builtins(job))
            for wanted in scene.wanted:
                self._wait_until(began_ns + wanted.at_ns)
                self._change(wanted)
            return self._watch.results(client, job)

    # -- helpers, in the order used -------------------------------------------------------------

    def _start(self, directory: Path) -> None:
        """The head, then the hosts; both instances serve."""
        file = self._folder / "pool.yaml"
        models = [{"path": str(directory), "name": MODEL, "roles": _roles(RolesWanted(0, 1, 1))}]
        file.write_text(pool_document(models, self._settings))
        self._watch.begin_head("-c", str(file))
        joined = self._watch.record.joined_ns
        # One after the other: workers are numbered as they come, prefill comes first, and a plan
        # that knows of no KV reads from the first copy.
        for host in self._bed.hosts[1:]:
            self._watch.begin_host(host.name, "--same-files")
            self._watch.until(partial(joined.__contains__, host.name), f"{host.name} joins")
        self._watch.until(lambda: len(self._watch.serving_hosts()) == 2, "two instances serve")

    def _wait_until(self, due_ns: int) -> None:
        self._watch.until(lambda: time.monotonic_ns() >= due_ns, "time passes")

    def _change(self, wanted: RolesWanted) -> None:
        """Ask for so many instances as an operator does. Raises BenchError."""
        words = ["models", "set", MODEL, "--url", _URL, "--roles", json.dumps(_roles(wanted))]
        inside = self._bed.inside(self._bed.hosts[0].name)
        done = subprocess.run(
            [*inside, *module_words("livescale.main", *words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        if done.returncode != 0:
            raise BenchError(f"livescale models set: {done.stderr.strip()}")
