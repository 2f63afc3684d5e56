"""Names of former settings, and their replacements for the error message."""

from __future__ import annotations

from livescale.config.settings.tuning import Tuning

_SIMULATED = "A pool uses {value}. `livescale simulate --strategy` compares other values"
_FIXED = "A pool uses {value}"
_VLLM = "Workers of device vllm use {value}"
_RATES = "A `topology` file sets link rates. Otherwise, the pool measures them"
_BOUNDS = "`scaling_policy` and `slo` decide when models grow"
_INSTEAD = {
    "hosts": "List hosts in a `topology` file, or let other nodes join",
    "timed_run_us": "Set `timed_profile: linear:RUN_US:TOKEN_US`",
    "timed_token_us": "Set `timed_profile: linear:RUN_US:TOKEN_US`",
    "uplink_bytes_per_s": _RATES,
    "downlink_bytes_per_s": _RATES,
    "target_ongoing_requests": "Set the key of this name in each model",
    "ttft_aim_ms": "Set `slo: ttft=…`",
    "cores_max": "With `cores_profile`, workers share the cores of their node",
    "weights_layout": "A CPU worker uses the fastest layout that fits the free memory",
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
    """The replacement of a former setting (None for any other name)."""
    if name not in Tuning.__struct_fields__:
        return None
    value = getattr(Tuning(), name)
    shown = "none" if value is None else value
    instead = _INSTEAD.get(name, _SIMULATED).format(value=shown)
    return f"{instead} (experiments may set {name} under `tuning:` in the configuration file)"
