"""Runs that several claims and figures look at are simulated once, whichever process asks first."""

from __future__ import annotations

import os

import pytest

from livescale.lab.reproduce.base.sharing import share_through


@pytest.fixture(scope="session", autouse=True)
def _shared_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    of_all = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = of_all / "shared-runs"
    folder.mkdir(exist_ok=True)
    share_through(folder)
