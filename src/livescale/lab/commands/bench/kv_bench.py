"""`livescale bench kv`: its flags."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from livescale.common.errors import UserError
from livescale.engine.files.make import make_model
from livescale.engine.files.model_files import model_spec, read_manifest
from livescale.lab.bench.kv.kv import KvReport, run_simulated
from livescale.lab.bench.kv.kv_scene import MODEL, RUN_TOKENS_MAX, SHAPE, KvScene
from livescale.lab.commands.bench.bench_flags import Bench, finish, say, within
from livescale.lab.commands.bench.kv_bench_run import HOSTS, run_emulated
from livescale.lab.commands.hosts_demo import emulated_hosts
from livescale.lab.testbed.spec import parse_rate
from livescale.values.types import Manifest

_PACKAGES = ("livescale", "numpy", "uvloop")
_KV_PERMILLE_MAX = 900


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--simulated", action="store_true", help="Skip emulated hosts (root).")
    add("--link", default="200mbit", metavar="RATE", help="Rate of every link.")
    words = "KV share of its link in thousandths."
    add("--kv-permille", type=int, default=333, metavar="N", help=words)
    add("--prompt-tokens", type=int, default=64, help="Tokens of each prompt.")
    words = "Tokens of each answer."
    add("--output-tokens", type=int, default=20, help=words)
    words = "Folder of the model, records and logs (default: a temporary folder)."
    add("--folder", type=Path, help=words)


def _kv(arguments: argparse.Namespace) -> int:
    """Measure KV and parameter transfers on shared links, simulated and emulated (root).

    0 when no request failed and every token was right.
    """
    within(arguments, 1, _KV_PERMILLE_MAX, "kv_permille")
    within(arguments, 1, RUN_TOKENS_MAX, "prompt_tokens")
    within(arguments, 3, 256, "output_tokens")
    with _folder(arguments.folder) as folder:
        directory = folder / MODEL
        if not directory.exists():
            make_model(directory, SHAPE)
        manifest = read_manifest(directory, MODEL)
        scene = _scene(arguments, manifest)
        report = KvReport(scene, run_simulated(scene, say))
        if not arguments.simulated:
            with emulated_hosts(HOSTS, arguments.link) as bed:
                report = run_emulated(bed, folder, directory, manifest, report, say)
    return finish(report, arguments, _PACKAGES, is_good=report.is_good)


# -- helpers, in the order used -------------------------------------------------------------------


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
        yield Path(scratch)


def _scene(arguments: argparse.Namespace, manifest: Manifest) -> KvScene:
    """Raises UserError where one instance cannot compute prompts as fast as they are to come."""
    scene = KvScene(
        model_spec(manifest),
        parse_rate(arguments.link),
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.kv_permille,
    )
    if scene.run_ns >= scene.every_ns:
        raise UserError(
            f"a prompt takes {scene.run_ns / 1e6:.0f} ms and one is to come every"
            f" {scene.every_ns / 1e6:.0f} ms: choose a slower --link or a smaller --kv-permille"
        )
    return scene


KV = Bench(_add_arguments, _kv)
