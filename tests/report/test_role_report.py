"""A run whose model has roles, as text, figures and a page."""

from __future__ import annotations

import msgspec
import pytest
from reported_records import Row, S, played, reported

from livescale.latency.shapes import LLAMA_3_8B
from livescale.messages.commands import ChangeDuty, StartHolding
from livescale.messages.events import BatchTaken, RoleChanged
from livescale.report.html import html_report
from livescale.report.pictures.keys import part_colours
from livescale.report.run.reported_run import ReportedRun
from livescale.report.run.role_usage import ROLE_HEADER
from livescale.report.run_report import run_text
from livescale.sim.base.config import SimConfig
from livescale.telemetry.record.record import RequestLine, StepLine
from livescale.telemetry.timeline import instances_over_time, roles_over_time
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.types import InstanceId, Role


@pytest.fixture(scope="module")
def run() -> ReportedRun:
    """Two bursts with a pause between them."""
    roles = (RoleLimits(Role.PREFILL, 1, 3), RoleLimits(Role.DECODE, 1, 3))
    config = SimConfig.default(LLAMA_3_8B, workers=4)
    policy = ModelPolicy(LLAMA_3_8B, 2, 4, 15_000, 30_000, roles=roles)
    controller = msgspec.structs.replace(config.controller, models=(policy,))
    config = msgspec.structs.replace(config, controller=controller)
    rows = [Row(start * S + k * 20_000_000, 900, 150) for start in (5, 30) for k in range(120)]
    return reported("split", played(rows, config), started_ns=5 * S)


def at(changes: list[tuple[int, int]], at_ns: int) -> int:
    return next((count for since, count in reversed(changes) if since <= at_ns), 0)


def test_instances_of_all_roles_are_all_instances(run: ReportedRun) -> None:
    whole, parts = instances_over_time(run.history), roles_over_time(run.history)
    assert list(parts) == [Role.PREFILL, Role.DECODE]
    assert max(count for _, count in whole) > 2, "it grew"
    times = {at_ns for changes in (whole, *parts.values()) for at_ns, _ in changes}
    for at_ns in times:
        assert at(whole, at_ns) == sum(at(of, at_ns) for of in parts.values()), at_ns


def test_device_time_of_all_roles_is_all_device_time(run: ReportedRun) -> None:
    used = sum(of.device_ns for of in run.by_role.values())
    assert used == sum(usage.device_ns for usage in run.usage.values())


def test_requests_that_moved_are_counted_with_their_kv(run: ReportedRun) -> None:
    roles: dict[InstanceId, Role] = {}
    moved: list[str] = []
    for line in [line for line in run.lines if isinstance(line, StepLine)]:
        for event in line.events:
            if isinstance(event, BatchTaken):
                ends = roles[event.target], roles[event.instance]
                if ends == (Role.PREFILL, Role.DECODE):
                    moved += [request for request, *_ in event.requests]
        for command in line.commands:
            if isinstance(command, StartHolding | ChangeDuty) and command.duty is not None:
                roles[command.duty.instance] = command.duty.role
    decode = run.by_role[Role.DECODE]
    assert decode.requests == len(moved) > 100
    # None had more than its first token when it moved, which has no KV yet.
    assert decode.kv_bytes == decode.requests * 900 * LLAMA_3_8B.kv_bytes_per_token
    of_request = {line.request: line for line in run.lines if isinstance(line, RequestLine)}
    gaps = sorted(of_request[r].token_ns[1] - of_request[r].token_ns[0] for r in moved)
    assert set(decode.gap_ns) == set(gaps)
    assert run.by_role[Role.PREFILL].requests == 0
    # Of all but those that were still on their way, or lost their KV, in the end.
    assert 0.9 * decode.requests <= len(decode.kv_ns) <= decode.requests
    assert all(kv_ns > 0 for kv_ns in decode.kv_ns)


def test_changes_of_role_are_counted_with_the_time_that_they_took(run: ReportedRun) -> None:
    said = [
        event.role
        for line in run.lines
        if isinstance(line, StepLine)
        for event in line.events
        if isinstance(event, RoleChanged)
    ]
    assert said
    figures = run.as_json()["by_role"]
    assert isinstance(figures, dict)
    for role, of in run.by_role.items():
        assert len(of.change_ns) == of.changed == said.count(role)
        assert ("role_change_max_s" in figures[role.value]) is bool(of.changed)
        if of.changed:
            assert figures[role.value]["role_change_max_s"] == max(of.change_ns) / 1e9


def test_the_report_has_a_row_for_each_role(run: ReportedRun) -> None:
    text, page = run_text(run), html_report([run], "roles")
    for word in ROLE_HEADER:
        assert word in text
        assert word in page
    assert "prefill instances that serve" in text
    assert "decode instances that serve" in text
    figures = run.as_json()["by_role"]
    assert isinstance(figures, dict)
    assert list(figures) == ["prefill", "decode"]
    assert figures["decode"]["requests_taken"] == run.by_role[Role.DECODE].requests
    assert "requests_taken" not in figures["prefill"]
    colours = part_colours([run])
    assert list(colours) == [f"{LLAMA_3_8B.name} {role}" for role in ("prefill", "decode")]
    assert len(set(colours.values())) == 2
    assert all(name in page for name in colours)
