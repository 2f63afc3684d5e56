"""When a waiting request is bound to an instance: strategies as values.

Ground floor: what is configured. The rules stand in `control/router.py`.
"""

from __future__ import annotations

from livescale.types import Value


class EarlyBinding(Value, frozen=True, tag="early"):
    """An instance gets whatever its KV has room for: it holds at most `ahead_max` requests that it
    has not admitted, and any number of others. Those of one client go in order of arrival."""

    ahead_max: int = 8


class LateBinding(Value, frozen=True, tag="late"):
    """An instance gets what it computes next, and the rest can still go elsewhere.

    It holds at most `ahead_tokens_max` prompt tokens that are not computed (or one request, however
    long that is). Of those that wait, the oldest get `oldest_prompt_percent` of the tokens and the
    shortest the rest, as in a Run (`batching/choosing.py`); `passes_max` requests, at most, may go
    before another one of their client that came earlier.
    """

    ahead_tokens_max: int = 4096
    oldest_prompt_percent: int = 50
    passes_max: int = 64


Binding = EarlyBinding | LateBinding
