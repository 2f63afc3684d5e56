"""What instances with each role did in a run: how many there were, what they held, and the requests
that went from prefill to decode instances, with their KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from livescale.common.settings import size_text
from livescale.config.slo import percentile
from livescale.report.run.terminal import charts_and_table, seconds
from livescale.telemetry.history.holding_history import InstanceHistory
from livescale.telemetry.history.reading import History
from livescale.telemetry.timeline import mean_until, roles_over_time, since
from livescale.values.types import RequestId, Role
from livescale.values.units import NS_PER_S

ROLE_HEADER = (
    *("role", "instances", "mean", "device time", "changed role", "slowest change"),
    *("requests taken", "KV", "KV of one"),
    *("pull p50", "pull p99", "KV p50", "KV p99", "2nd token p50", "2nd token p99"),
)


@dataclass(slots=True)
class RoleUsage:
    """Of the instances with one role. `instances` are (ns since the load's start, how many serve);
    `changed` counts instances that came to the role from another one, without a load, `change_ns`
    are the times from these orders until the instances had the role.

    Of decode instances, too: `requests` that they took over from prefill instances, the `kv_bytes`
    that these had there, `pull_ns` from asking for each of these requests to having it, `kv_ns`
    from the arrival of the first layer of its KV to that of the last, and `gap_ns` between its
    first and its second token.
    """

    instances: list[tuple[int, int]] = field(default_factory=list)
    device_ns: int = 0
    changed: int = 0
    change_ns: list[int] = field(default_factory=list)
    requests: int = 0
    kv_bytes: int = 0
    pull_ns: list[int] = field(default_factory=list)
    kv_ns: list[int] = field(default_factory=list)
    gap_ns: list[int] = field(default_factory=list)

    def as_json(self, end_ns: int) -> dict[str, object]:
        """By name; what was not measured is absent."""
        counts = [count for _, count in self.instances]
        figures: dict[str, object] = {
            "max_instances": max(counts),
            "final_instances": counts[-1],
            "instances_mean": mean_until(self.instances, end_ns),
            "device_seconds": self.device_ns / NS_PER_S,
            "changed_role": self.changed,
        }
        if self.change_ns:
            figures |= {
                "role_change_p50_s": percentile(self.change_ns, 50) / NS_PER_S,
                "role_change_max_s": max(self.change_ns) / NS_PER_S,
            }
        if self.requests:
            figures |= {
                "requests_taken": self.requests,
                "kv_bytes": self.kv_bytes,
                "kv_bytes_per_request": self.kv_bytes / self.requests,
            }
        times = {"pull": self.pull_ns, "kv": self.kv_ns, "second_token": self.gap_ns}
        for name, values in times.items():
            if values:
                figures |= {
                    f"{name}_p50_s": percentile(values, 50) / NS_PER_S,
                    f"{name}_p99_s": percentile(values, 99) / NS_PER_S,
                }
        return figures


def usage_by_role(history: History, from_ns: int, to_ns: int) -> dict[Role, RoleUsage]:
    """Of every role that an instance had; empty where all were unified. Device time is that
    between `from_ns` and `to_ns`, all else that of the whole record."""
    roles = {role for instance in history.instances for _, role in instance.roles}
    if roles <= {Role.UNIFIED}:
        return {}
    found = {role: RoleUsage(instances=[(0, 0)]) for role in Role if role in roles}
    for role, changes in roles_over_time(history).items():
        found[role].instances = since(changes, from_ns)
    gaps_ns = {
        line.request: line.token_ns[1] - line.token_ns[0]
        for line in history.requests
        if len(line.token_ns) > 1
    }
    for instance in history.instances:
        for role, held_ns in _held_ns(instance, from_ns, to_ns).items():
            found[role].device_ns += held_ns
        for _, role in instance.roles[1:]:
            found[role].changed += 1
        for role, change_ns in instance.role_changes:
            found[role].change_ns.append(change_ns)
        if Role.DECODE in found:
            spec = history.policies[instance.model].spec
            token_bytes = spec.kv_bytes_per_token * spec.tp_size
            _count_pulled(found[Role.DECODE], instance, token_bytes, gaps_ns)
    return found


def role_text(usage: Mapping[Role, RoleUsage], end_ns: int) -> str:
    """A chart and a row for each role; empty without roles."""
    instances = {f"{role} instances that serve": of.instances for role, of in usage.items()}
    return charts_and_table(instances, end_ns, ROLE_HEADER, role_rows(usage, end_ns))


def role_rows(usage: Mapping[Role, RoleUsage], end_ns: int) -> list[tuple[str, ...]]:
    """A row of words for each role below ROLE_HEADER."""
    return [_row(role, of, end_ns) for role, of in usage.items()]


# -- helpers, in the order used -------------------------------------------------------------------


def _held_ns(instance: InstanceHistory, from_ns: int, to_ns: int) -> dict[Role, int]:
    """How long its devices were held with each role, loading included."""
    held: dict[Role, int] = {}
    for role, start_ns, stop_ns in instance.role_stretches(to_ns):
        for holding in instance.holdings:
            ended_ns = to_ns if holding.ended_ns is None else holding.ended_ns
            left_ns = max(start_ns, holding.begun_ns, from_ns)
            span_ns = min(stop_ns, ended_ns, to_ns) - left_ns
            held[role] = held.get(role, 0) + max(span_ns, 0)
    return held


def _count_pulled(
    usage: RoleUsage,
    instance: InstanceHistory,
    token_bytes: int,
    gaps_ns: Mapping[RequestId, int],
) -> None:
    for _, batch in instance.pulled:
        usage.requests += len(batch.requests)
        # The last token of each has no KV yet.
        usage.kv_bytes += (batch.tokens - len(batch.requests)) * token_bytes
        usage.pull_ns += [batch.pull_ns] * len(batch.requests)
        usage.gap_ns += [gaps_ns[name] for name, *_ in batch.requests if name in gaps_ns]
    pulled = {name for _, batch in instance.pulled for name, *_ in batch.requests}
    for kv in instance.kv:
        usage.kv_ns += [kv.arrival_ns for name, _ in kv.requests if name in pulled]


def _row(role: Role, of: RoleUsage, end_ns: int) -> tuple[str, ...]:
    counts = [count for _, count in of.instances]
    times = [
        seconds(percentile(values, q) / NS_PER_S if values else None)
        for values in (of.pull_ns, of.kv_ns, of.gap_ns)
        for q in (50, 99)
    ]
    return (
        role.value,
        f"{counts[0]} -> {max(counts)} -> {counts[-1]}",
        f"{mean_until(of.instances, end_ns):.2f}",
        seconds(of.device_ns / NS_PER_S),
        str(of.changed),
        seconds(max(of.change_ns) / NS_PER_S if of.change_ns else None),
        f"{of.requests:,}" if of.requests else "-",
        size_text(of.kv_bytes) if of.requests else "-",
        size_text(of.kv_bytes / of.requests) if of.requests else "-",
        *times,
    )
