"""Fixtures that several floors share: small models, made once per run."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: two test processes on two cores must not oversubscribe.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

from livescale.engine.make import make_model
from livescale.testbed.bed import Testbed
from livescale.testbed.errors import TestbedError
from livescale.testbed.spec import NetworkSpec

# A deadline would be an absolute time: examples may wait for compilers and for other processes.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 3 MB. Tests that change files copy it first."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model(directory, "tiny")
    return directory


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
