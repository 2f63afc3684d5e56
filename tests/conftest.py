"""Fixtures that several floors share: small models, made once per run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported anywhere: two test processes on two cores must not oversubscribe.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from filelock import FileLock
from hypothesis import settings

from livescale.engine.make import make_model
from livescale.testbed.bed import Testbed
from livescale.testbed.errors import TestbedError
from livescale.testbed.spec import NetworkSpec

# A deadline would be an absolute time: examples may wait for compilers and for other processes.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


# What starts processes that compute, or measures time, is alone among its kind.
ONE_AT_A_TIME = {"pool", "chaos", "netns"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test process runs all that start a pool; another one what is left, then both share it."""
    for item in items:
        if any(mark.name in ONE_AT_A_TIME for mark in item.iter_markers()):
            item.add_marker(pytest.mark.xdist_group("pools"))


MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> MadeOnce:
    """A directory that one test process makes and all of them read."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "made-once"
    root.mkdir(exist_ok=True)

    def directory(name: str, make: Callable[[Path], None]) -> Path:
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.made").exists():
                (root / name).mkdir()
                make(root / name)
                (root / f"{name}.made").touch()
        return root / name

    return directory


@pytest.fixture(scope="session")
def tiny_model(made_once: MadeOnce) -> Path:
    """A model of about 3 MB. Tests that change files copy it first."""
    return made_once("shared", lambda root: make_model(root / "tiny", "tiny")) / "tiny"


@pytest.fixture(scope="session")
def network_namespaces() -> None:
    """Skips what asks for it where no testbed can be built, and says why: the smallest is tried."""
    try:
        with Testbed(NetworkSpec(hosts=1, link_bits_per_s=1_000_000_000)):
            pass
    except TestbedError as error:
        pytest.skip(f"no testbed here: {error}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=3, help="rounds of chaos")
    parser.addoption("--seed", type=int, default=0, help="seed of the first round of chaos")
    parser.addoption("--faults", help="of chaos, in turn: comma-separated (default: all)")
    parser.addoption("--pool", help="of all rounds of chaos: timed, real, pair, ...")
