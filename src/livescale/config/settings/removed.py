"""Names that were settings once, and what is there instead: who gives one is told."""

from __future__ import annotations

from livescale.config.settings.tuning import Tuning

_SIMULATED = "the simulator compares it (livescale simulate --strategy); a pool has {value}"
_FIXED = "a pool has {value}"
_VLLM = "workers of device vllm have {value}"
_RATES = "rates of links stand in a `topology`, and are probed otherwise"
_BOUNDS = "`scaling_policy` and `slo` say when models grow"
_INSTEAD = {
    "hosts": "a `topology` has hosts; other machines join",
    "timed_run_us": "`timed_profile: linear:RUN_US:TOKEN_US`",
    "timed_token_us": "`timed_profile: linear:RUN_US:TOKEN_US`",
    "uplink_bytes_per_s": _RATES,
    "downlink_bytes_per_s": _RATES,
    "target_ongoing_requests": "the key of that name of each model",
    "ttft_aim_ms": "`slo: ttft=…`",
    "cores_max": "with `cores_profile` workers share the cores of their machine",
    "weights_layout": "a CPU takes the layout that is fastest in the memory that there is",
    **dict.fromkeys(("vllm_engines_max", "vllm_engines_bytes", "vllm_any_version"), _VLLM),
    **dict.fromkeys(("block_tokens", "chunk_bytes", "record_bytes_max", "settle_ms"), _FIXED),
    **dict.fromkeys(("stall_ms", "stuck_after_ms", "receive_timeout_s"), _FIXED),
    **dict.fromkeys(("stalled_client_s", "storage_bytes_per_s", "request_attempts_max"), _FIXED),
    **{
        f"{what}_{side}_{unit}": _BOUNDS
        for what, unit in (
            *(("token_rate", "percent"), ("prefill_queue", "ms")),
            *(("kv", "percent"), ("requests", "percent")),
        )
        for side in ("upper", "lower")
    },
}


def instead_of(name: str) -> str | None:
    """What is there instead of this setting; None for what never was one."""
    if name not in Tuning.__struct_fields__:
        return None
    value = getattr(Tuning(), name)
    shown = "none" if value is None else value
    instead = _INSTEAD.get(name, _SIMULATED).format(value=shown)
    return f"{instead} (measurements may have it under `tuning:` of the configuration file)"
