"""Hosts, links, gateways and the head of a pool over several machines are struck while it serves:
nothing is lost but the streams of a gateway that is, nothing is wrong. Three rounds by default, of
which `make test` has one; `make chaos-hosts` runs many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from certificates import Cluster
from hosts_round import FAULTS, GATEWAYS, HOSTS, LINK_BITS_PER_S, HostsPool

from effort import mostly_long
from livescale.lab.testbed.bed import Testbed
from livescale.lab.testbed.spec import NetworkSpec

pytestmark = pytest.mark.usefixtures("machine")
ROUNDS = 3


class Case(NamedTuple):
    """What is struck, and the seed of everything else."""

    fault: str
    seed: int


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hosts_round" not in metafunc.fixturenames:
        return
    rounds = metafunc.config.getoption("--rounds")
    seed = metafunc.config.getoption("--seed", 0)
    faults = metafunc.config.getoption("--faults", None)
    faults = FAULTS if faults is None else faults.split(",")
    cases = [
        Case(faults[number % len(faults)], seed + number) for number in range(rounds or ROUNDS)
    ]
    short = cases if rounds is not None else cases[:1]
    metafunc.parametrize(
        "hosts_round", mostly_long(cases, short), ids=lambda case: f"{case.fault}-{case.seed}"
    )


@pytest.fixture(scope="module")
def hosts(
    network_namespaces: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostsPool]:
    spec = NetworkSpec(hosts=1 + len(HOSTS) + len(GATEWAYS), link_bits_per_s=LINK_BITS_PER_S)
    with Testbed(spec) as bed:
        scratch = tmp_path_factory.mktemp("hosts")
        made = HostsPool(bed, tiny_model, scratch, Cluster(scratch / "cluster"))
        try:
            made.start()
            yield made
        finally:
            made.close()


def test_a_round(hosts: HostsPool, hosts_round: Case) -> None:
    fault, seed = hosts_round
    print(f"round {seed}: {fault}: we {hosts.round(fault, seed)}")
