"""What plans reckon with: the carrier inside a host, configured rates, and what was measured."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from stories import DEVICE, H, W, arrived, loaded, make_controller, plans_of, serves, step

from livescale.clusters.topology import Device, Direction, Host
from livescale.control.controller import Controller
from livescale.messages.events import AgentJoined, LinkMeasured, WorkerJoined
from livescale.values.types import HoldingId

SIZE_BYTES = 60
NS_PER_S = 1_000_000_000
rates = st.integers(10, 10_000)


def predicted_ns(controller: Controller, device: Device, *measured: LinkMeasured) -> int | None:
    """Of the plan for a second instance, on a device beside the first."""
    joins = [msgspec.structs.replace(serves(W[0], 101)[0], device=device), serves(W[0], 101)[1]]
    step(controller, 0, *joins, WorkerJoined(W[1], device), *measured)
    requests = [arrived(f"r{n}", 10_000) for n in range(9)]
    (plan,) = plans_of(step(controller, 1, *requests))
    return plan.predicted_ns


@given(told=rates, up=rates, down=rates)
def test_without_shared_memory_bytes_of_a_host_cross_nics(told: int, up: int, down: int) -> None:
    device = msgspec.structs.replace(DEVICE, uplink_bytes_per_s=up, downlink_bytes_per_s=down)
    own = make_controller(2, group_bytes_per_s=told)
    slowest = SIZE_BYTES * NS_PER_S // min(up, down)
    assert predicted_ns(own, device) == slowest
    shared = make_controller(2, group_bytes_per_s=told)
    joint = msgspec.structs.replace(device, group="host")
    assert predicted_ns(shared, joint) == SIZE_BYTES * NS_PER_S // told


@given(guess=rates, probes=st.lists(rates, max_size=3), is_guess=st.booleans())
def test_the_best_probe_inside_a_host_replaces_a_guess_and_nothing_told(
    guess: int, probes: list[int], is_guess: bool
) -> None:
    controller = make_controller(2, group_bytes_per_s=guess, assumes_group_rate=is_guess)
    joint = msgspec.structs.replace(DEVICE, group="host")
    measured = [LinkMeasured(W[0], W[1], rate) for rate in probes]
    expected = max(probes) if probes and is_guess else guess
    assert predicted_ns(controller, joint, *measured) == SIZE_BYTES * NS_PER_S // expected
    assert controller.planning.topology.nic_bytes_per_s(W[0], "out") is None


@given(own=rates, up=rates, down=rates, share=st.integers(1, 100))
def test_a_hosts_memory_reaches_its_devices_as_the_host_says(
    own: int, up: int, down: int, share: int
) -> None:
    device = msgspec.structs.replace(DEVICE, downlink_bytes_per_s=down)
    for has_links, rate in ((True, own), (False, min(max(1, up * share // 100), down))):
        host = Host("host", "leaf", 1000, up, down, own, None, has_links)
        controller = make_controller(1, parameter_share_percent=share, agents_expected=1)
        commands = step(controller, 0, AgentJoined(H[0], host))
        commands = step(controller, 2 * NS_PER_S, WorkerJoined(W[0], device))
        plans = [plan for plan in plans_of(commands) if plan.instances]
        (plan,) = plans or plans_of(step(controller, 3 * NS_PER_S, *loaded(HoldingId(1, H[0]))))
        (load,) = plan.loads
        assert load.completed_ns is not None
        # While the copy itself arrives one chunk's time is added.
        assert 0 <= load.completed_ns - SIZE_BYTES * NS_PER_S // rate <= NS_PER_S * 10 // rate + 1


@given(
    own=st.none() | rates,
    told=st.none() | rates,
    probes=st.lists(rates, max_size=3),
)
def test_a_nic_carries_what_is_told_else_the_best_probe_else_what_it_says(
    own: int | None, told: int | None, probes: list[int]
) -> None:
    controller = make_controller(2)
    nic = msgspec.structs.replace(DEVICE, interface_bytes_per_s=own, downlink_bytes_per_s=told)
    step(controller, 0, WorkerJoined(W[0], DEVICE), WorkerJoined(W[1], nic))
    step(controller, 1, *(LinkMeasured(W[0], W[1], rate) for rate in probes))
    expected = told if told is not None else own
    if told is None and probes:
        expected = min(max(probes), own) if own is not None else max(probes)
    topology = controller.planning.topology
    assert topology.nic_bytes_per_s(W[1], Direction.IN) == expected
    assert topology.nic_bytes_per_s(W[1], Direction.OUT) == own


@given(slow=rates, fast=rates, probe=rates)
def test_a_probe_tells_nothing_of_the_faster_of_two_nics(slow: int, fast: int, probe: int) -> None:
    controller = make_controller(2)
    nics = [msgspec.structs.replace(DEVICE, interface_bytes_per_s=own) for own in (fast, slow)]
    step(controller, 0, *(WorkerJoined(W[n], nic) for n, nic in enumerate(nics)))
    step(controller, 1, LinkMeasured(W[0], W[1], probe))
    topology = controller.planning.topology
    out = topology.nic_bytes_per_s(W[0], Direction.OUT)
    into = topology.nic_bytes_per_s(W[1], Direction.IN)
    assert out == (fast if slow < fast else min(probe, fast))
    assert into == (slow if fast < slow else min(probe, slow))


def test_an_agent_s_nic_says_what_it_carries() -> None:
    host = Host("host", "leaf", 1000, interface_bytes_per_s=500)
    controller = make_controller(1, agents_expected=1)
    step(controller, 0, AgentJoined(H[0], host))
    topology = controller.planning.topology
    assert topology.nic_bytes_per_s(H[0], Direction.OUT) == 500


@given(share=st.integers(1, 100))
def test_parameters_may_have_all_of_an_uplink_that_no_data_plane_limits(share: int) -> None:
    controller = make_controller(1, parameter_share_percent=share)
    nic = msgspec.structs.replace(DEVICE, interface_bytes_per_s=500)
    step(controller, 0, WorkerJoined(W[0], nic))
    assert controller.planning.topology.nic_bytes_per_s(W[0], Direction.OUT) == 500
