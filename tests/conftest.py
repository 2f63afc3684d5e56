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

# A deadline would be an absolute time: examples may wait for compilers and for other processes.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 3 MB. Tests that change files copy it first."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model(directory, "tiny")
    return directory
