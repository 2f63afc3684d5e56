"""Settings of the baselines, which stay what they are when the product's defaults change."""

from __future__ import annotations

from collections.abc import Mapping

from livescale.batching.live.live_batch import LiveLimits
from livescale.sim.base.config import SERVING_FIRST
from livescale.values.bindings import EarlyBinding
from livescale.values.scaling_policies import Bounds
from livescale.values.types import SEQUENCES_MAX
from livescale.values.units import NS_PER_S

BASELINE: Mapping[str, object] = {
    "settle_ns": NS_PER_S,
    "binding": EarlyBinding(ahead_max=8),
    "dispatched_ahead_max": 8,
    "sequences_max": SEQUENCES_MAX,
    "request_attempts_max": 2,
    "load_retry_ns": NS_PER_S,
    "load_retry_ns_max": 30 * NS_PER_S,
    "load_failures_max": 3,
    "avoid_ns": NS_PER_S,
    "scaling": Bounds(
        token_rate_upper_permille=900,
        token_rate_lower_permille=600,
        backlog_upper_ns=700_000_000,
        backlog_lower_ns=500_000_000,
        kv_upper_permille=850,
        kv_lower_permille=750,
        requests_upper_permille=850,
        requests_lower_permille=750,
        load_window_ns=NS_PER_S,
        scale_down_timeout_ns=333_000_000,
    ),
    "drain": "finish",
    "warm_spares": "off",
    "spares_ahead": False,
    "stage_placement": "as-models",
    "spare_idle_ns": NS_PER_S,
    "live_over_ns": 100_000_000,
    "live_ahead_max": 8,
    "pairs": None,
    "chunk_bytes": 1 << 20,
    "avoids_serving": True,
    "mutations": True,
    "assumes_group_rate": False,
    "parameter_share_percent": 100,
}
"""Of stop, overlap and zigzag: settings of the controller that stay what they are when the
product's defaults change, so that figures of different versions compare. Scaling follows bounds,
requests are bound to instances early, and released devices keep nothing."""
BASELINE_WORLD: Mapping[str, object] = {
    "link_sharing": SERVING_FIRST,
    "run_tokens_max": 2048,
    "oldest_prompt_percent": 50,
    "growth_tokens": 64,
    "live": LiveLimits(
        batches_max=16,
        batch_tokens_max=2048,
        span_ns=20_000_000,
        gap_ns=0,
        kv_layers_ahead=4,
        answer_ns=5 * NS_PER_S,
        pulls_max=2,
        pull_early_permille=0,
        decodes_first=False,
        kv_holds_pulls=False,
        kv_follows=False,
        kv_ahead=False,
        kv_straight=False,
        move_factor=0,
    ),
}
"""Of the same, settings of the instances."""
