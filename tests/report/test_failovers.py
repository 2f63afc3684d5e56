"""Losses and replacements of a run: every one has its row, in the text and on the page."""

from __future__ import annotations

import re
from functools import cache

import msgspec
import pytest
from reported_records import STARTED_NS, Row, S, played, reported

from livescale.clusters.topology import Device, Host
from livescale.latency.shapes import LLAMA_3_8B
from livescale.messages.commands import Dispatch, StartHolding
from livescale.messages.events import (
    AgentJoined,
    MembersLeave,
    RequestEnded,
    WorkerJoined,
    WorkerLost,
)
from livescale.report.html import html_report
from livescale.report.run_report import failover_text, run_text
from livescale.sim.base.config import FaultConfig, HostStay, SimConfig
from livescale.telemetry.history.reading import Departure, Loss, read_history
from livescale.telemetry.record.record import RECORD_VERSION, AnyLine, RunLine, StepLine
from livescale.values.routes import Duty
from livescale.values.types import HoldingId, LayerSpan, Outcome, WorkerRef, agent_ref

DEVICE = Device("cpu", "host", "leaf", 1000, 1000)
CONFIG = SimConfig.default(LLAMA_3_8B, workers=1).controller
BEGUN = RunLine(RECORD_VERSION, "sim", CONFIG)


@cache
def faulty(seed: int) -> tuple[AnyLine, ...]:
    """A burst in which two workers, an agent and the controller are lost."""
    config = SimConfig.default(LLAMA_3_8B, workers=4)
    hosts = tuple(Host(f"host-{n}", "leaf-0", 192 * 10**9) for n in range(2))
    controller = msgspec.structs.replace(config.controller, agents_expected=2)
    faults = FaultConfig(
        worker_losses=2, agent_losses=1, controller_restarts=1, until_ns=STARTED_NS + 4 * S
    )
    config = msgspec.structs.replace(config, controller=controller, hosts=hosts, faults=faults)
    rows = [Row(STARTED_NS + k * 40_000_000, 1500, 20) for k in range(100)]
    return played(rows, config, seed)


def step(now_ns: int, *events: object, commands: tuple[object, ...] = ()) -> StepLine:
    return StepLine(now_ns, events, commands, now_ns)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_every_loss_of_a_faulty_run_has_its_row_and_its_successor(seed: int) -> None:
    found = read_history(faulty(seed)).losses
    kinds = [loss.member.rsplit(" ", 1)[0] for loss in found]
    assert sorted(kinds) == ["controller", "host agent", "worker", "worker"]
    for loss in found:
        assert loss.back_ns is not None
        assert loss.at_ns <= loss.back_ns
        # The end of a controller is not on record, only the last thing that it did.
        assert loss.member == "controller" or loss.back_ns <= loss.at_ns + S
    assert [loss.at_ns for loss in found] == sorted(loss.at_ns for loss in found)


def test_rows_stand_in_the_text_on_the_page_and_in_the_figures() -> None:
    run = reported("burst", faulty(1))
    text, page = run_text(run), html_report([run], "burst")
    for loss in run.history.losses:
        assert loss.member in text
        assert loss.member in page
    assert "Losses and replacements" in page
    assert run.as_json()["members_lost"] == 4
    assert run.as_json()["members_replaced"] == 4


def test_a_run_without_losses_has_no_such_table() -> None:
    lines = (BEGUN, step(STARTED_NS, WorkerJoined(WorkerRef(0), DEVICE)))
    run = reported("calm", lines)
    assert failover_text(run) == ""
    assert "Losses and replacements" not in html_report([run], "calm")


def test_who_leaves_in_order_is_not_lost() -> None:
    """Of those that are to leave, too, one that has a part in an instance when it is gone is."""
    idle, serving, other, agent = WorkerRef(0), WorkerRef(1), WorkerRef(2), agent_ref(3)
    load = StartHolding(
        HoldingId(1, serving), "m", LayerSpan(0, 1), (), 1, duty=Duty(1, (serving,))
    )
    copy = StartHolding(HoldingId(2, agent), "m", LayerSpan(0, 1), (), 1)
    lines = [
        BEGUN,
        step(
            1,
            *(WorkerJoined(worker, DEVICE) for worker in (idle, serving, other)),
            AgentJoined(agent, Host("h", "leaf", 1)),
            commands=(load, copy),
        ),
        step(2, MembersLeave((idle, serving, agent)), commands=(Dispatch("a", 0, 1, serving),)),
        step(3, WorkerLost(serving, "killed")),
        step(4, WorkerLost(idle, "closed"), WorkerLost(agent, "closed"), WorkerLost(other, "died")),
        step(9, WorkerJoined(WorkerRef(0, 1), DEVICE)),
        step(10, WorkerLost(WorkerRef(0, 1), "died")),
    ]
    history = read_history(lines)
    assert history.losses == [
        Loss(3, "worker w1.0", "killed", ("m",), 1),
        Loss(4, "worker w2.0", "died"),
        Loss(10, "worker w0.1", "died"),
    ]
    assert history.departures == [
        Departure(4, "worker w0.0", back_ns=9),
        Departure(4, "host agent h3.0", ("m",)),
    ]


def test_a_report_says_apart_who_left_and_who_was_lost() -> None:
    config = SimConfig.default(LLAMA_3_8B, workers=4)
    hosts = tuple(Host(f"host-{n}", "leaf-0", 192 * 10**9) for n in range(2))
    controller = msgspec.structs.replace(config.controller, agents_expected=2)
    leave_ns = STARTED_NS + 6 * S
    config = msgspec.structs.replace(
        config,
        controller=controller,
        hosts=hosts,
        faults=FaultConfig(worker_losses=1, until_ns=STARTED_NS + 4 * S),
        stays=(HostStay("host-1", until_ns=leave_ns, patience_ns=60 * S, away_ns=5 * S),),
    )
    rows = [Row(STARTED_NS + k * 80_000_000, 1500, 20) for k in range(200)]
    run = reported("both", played(rows, config), started_ns=0)
    [lost] = run.history.losses
    left = run.history.departures
    assert lost.at_ns < leave_ns
    assert len(left) == 3
    assert all(leave_ns < one.at_ns < (one.back_ns or 0) for one in left)
    figures = run.as_json()
    assert (figures["members_lost"], figures["members_left"]) == (1, 3)
    losses, departures = failover_text(run).split("\n\n")
    assert lost.member in losses
    assert all(one.member in departures for one in left)
    page = html_report([run], "both")
    _, losses, departures = re.split("Losses and replacements</h2>|Departures</h2>", page)
    assert lost.member in losses
    assert all(one.member in departures for one in left)
    assert {"device_lost_s", "device_left_s"} <= run.figures.keys()
    assert re.search(r"lost \d.* %, left \d", run_text(run))


def test_a_lost_worker_names_its_model_and_the_requests_that_it_had() -> None:
    worker, successor = WorkerRef(0), WorkerRef(0, 1)
    duty = Duty(1, (worker,))
    load = StartHolding(HoldingId(1, worker), "m", LayerSpan(0, 1), (), 1, duty=duty)
    lines = [
        BEGUN,
        step(1, WorkerJoined(worker, DEVICE), commands=(load,)),
        step(2, commands=tuple(Dispatch(name, 0, 1, worker) for name in "abc")),
        step(3, RequestEnded("b", 0, Outcome.FINISHED, 1, worker)),
        step(4, WorkerLost(worker, "gone")),
        step(9, WorkerJoined(successor, DEVICE)),
        step(10, WorkerLost(worker, "told twice")),
    ]
    assert read_history(lines).losses == [Loss(4, "worker w0.0", "gone", ("m",), 2, 9)]


def test_a_member_that_was_replaced_while_no_controller_looked_is_a_loss() -> None:
    lines = [
        BEGUN,
        step(
            1, AgentJoined(agent_ref(0), Host("h", "leaf", 1)), WorkerJoined(WorkerRef(1), DEVICE)
        ),
        BEGUN,
        step(7, AgentJoined(agent_ref(0, 1), Host("h", "leaf", 1))),
        step(8, WorkerJoined(WorkerRef(1), DEVICE)),
    ]
    controller, agent = read_history(lines).losses
    assert (controller.member, controller.at_ns, controller.back_ns) == ("controller", 1, 7)
    assert (agent.member, agent.at_ns, agent.back_ns) == ("host agent h0.0", 7, 7)


def test_a_further_part_is_no_failover() -> None:
    opened = msgspec.structs.replace(BEGUN, is_continued=True)
    joined = WorkerJoined(WorkerRef(1), DEVICE)
    assert read_history([BEGUN, step(1, joined), opened, step(2, joined)]).losses == []
