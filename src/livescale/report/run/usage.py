"""What each model of a run was asked, and what it took."""

from __future__ import annotations

from dataclasses import dataclass

from livescale.telemetry.history.device_time import DeviceUse, device_stretches
from livescale.telemetry.history.reading import History


@dataclass(slots=True)
class ModelUsage:
    """Sums over a run. `device_ns` is how long instances held devices, loading included; `spare_ns`
    how long released devices kept the parameters besides, serving nothing.

    Of `starts` (instances that were ordered) so many were `warm_starts`, which found the parameters
    on their devices. `loaded_bytes` are those that devices received. `slo_met` is None where no
    request was judged.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    slo_met: int | None = None
    device_ns: int = 0
    spare_ns: int = 0
    starts: int = 0
    warm_starts: int = 0
    loaded_bytes: int = 0


def usage_by_model(
    history: History, from_ns: int = 0, to_ns: int | None = None
) -> dict[str, ModelUsage]:
    """The sums of every model that was asked for or loaded, by name.

    A device is held from the order to load until it is released, fails to load or is lost, or
    until the record's last step; of that, what lies between `from_ns` and `to_ns` counts. So it is
    with warm spares; starts and bytes are those of the whole record.
    """
    usage: dict[str, ModelUsage] = {}
    for line in history.requests:
        of_model = usage.setdefault(line.model, ModelUsage())
        of_model.requests += 1
        of_model.prompt_tokens += line.prompt_tokens
        of_model.generated_tokens += len(line.token_ns)
        if line.slo_met is not None:
            of_model.slo_met = (of_model.slo_met or 0) + line.slo_met
    stop_ns = history.end_ns if to_ns is None else min(to_ns, history.end_ns)
    for held in history.holdings:
        ended_ns = stop_ns if held.ended_ns is None else min(held.ended_ns, stop_ns)
        of_model = usage.setdefault(held.model, ModelUsage())
        held_ns = max(ended_ns - max(held.begun_ns, from_ns), 0)
        of_model.device_ns += held_ns
        of_model.loaded_bytes += held.received_bytes or 0
    for stretches in device_stretches(history, from_ns, max(stop_ns, from_ns)).values():
        for start_ns, end_ns, use, model in stretches:
            if use is DeviceUse.SPARE:
                usage.setdefault(model, ModelUsage()).spare_ns += end_ns - start_ns
    for instance in history.instances:
        usage[instance.model].starts += instance.is_ordered
        usage[instance.model].warm_starts += instance.is_ordered and instance.is_woken
    return dict(sorted(usage.items()))
