"""When a waiting request is bound to an instance: strategies as values.

Ground floor: what is configured. The rules stand in `control/requests/router.py`.
"""

from __future__ import annotations

from livescale.values.types import Value


class EarlyBinding(Value, frozen=True, tag="early"):
    """An instance gets whatever its KV has room for: it holds at most `ahead_max` requests that it
    has not admitted, and any number of others. Those of one client go in order of arrival."""

    ahead_max: int = 8


class LateBinding(Value, frozen=True, tag="late"):
    """An instance gets what it computes next, and the rest can still go elsewhere.

    It holds at most `ahead_tokens_max` prompt tokens that are not computed (or one request, however
    long that is). Those that wait are served as if all of them shared Runs of `run_tokens_max`
    (`batching/runs/choosing.py`): in each the oldest one gets up to `oldest_prompt_percent`, and
    the shortest the rest. `passes_max` requests, at most, may go before another one of their client
    that came earlier: a bound for floods of tiny prompts, since a share bounds the time already.
    Of instances with equal work the one comes first that was given a request longest ago.
    """

    ahead_tokens_max: int = 4096
    oldest_prompt_percent: int = 50
    passes_max: int = 1 << 16
    run_tokens_max: int = 2048


Binding = EarlyBinding | LateBinding
