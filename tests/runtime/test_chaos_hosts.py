"""Hosts, links and the head of a pool over several machines are struck while it serves: nothing is
lost, nothing is wrong. Two rounds by default; `make chaos-hosts` runs many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Cluster
from hosts_round import FAULTS, HOSTS, LINK_BITS_PER_S, HostsPool

from livescale.testbed.bed import Testbed
from livescale.testbed.spec import NetworkSpec

pytestmark = [pytest.mark.pool, pytest.mark.chaos, pytest.mark.netns]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hosts_round" not in metafunc.fixturenames:
        return
    rounds = metafunc.config.getoption("--rounds")
    seed = metafunc.config.getoption("--seed", 0)
    faults = metafunc.config.getoption("--faults", None)
    faults = FAULTS if faults is None else faults.split(",")
    cases = [(faults[number % len(faults)], seed + number) for number in range(rounds)]
    metafunc.parametrize("hosts_round", cases, ids=lambda case: f"{case[0]}-{case[1]}")


@pytest.fixture(scope="module")
def hosts(
    network_namespaces: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostsPool]:
    spec = NetworkSpec(hosts=len(HOSTS) + 1, link_bits_per_s=LINK_BITS_PER_S)
    with Testbed(spec) as bed:
        scratch = tmp_path_factory.mktemp("hosts")
        made = HostsPool(bed, tiny_model, scratch, Cluster(scratch / "cluster"))
        try:
            made.start()
            yield made
        finally:
            made.close()


def test_a_round(hosts: HostsPool, hosts_round: tuple[str, int]) -> None:
    fault, seed = hosts_round
    print(f"round {seed}: {fault}: we {hosts.round(fault, seed)}")
