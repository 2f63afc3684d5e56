"""How fast a model's instances compute prompts while they serve, as they report it."""

from __future__ import annotations

from livescale.values.units import NS_PER_S

_KNOWN_NS = 200_000_000
"""Less time in Runs than this says nothing yet."""
_REMEMBERED_NS = 10_000_000_000
"""What is older than this much time in Runs counts half, and so on."""


class ServiceRate:
    """Prompt tokens over the time of the Runs that computed them, whatever else these computed:
    what decodes cost prompts is in it. Idle time is not."""

    def __init__(self) -> None:
        self._tokens = 0
        self._ns = 0

    def add(self, tokens: int, run_ns: int) -> None:
        """Runs that took `run_ns` have computed so many tokens."""
        if tokens < 0 or run_ns <= 0:
            return
        self._tokens += tokens
        self._ns += run_ns
        if self._ns > 2 * _REMEMBERED_NS:
            self._tokens //= 2
            self._ns //= 2

    @property
    def tokens_per_s(self) -> int | None:
        """Of one instance; None: not known yet."""
        if self._ns < _KNOWN_NS:
            return None
        return max(self._tokens * NS_PER_S // self._ns, 1)

    def __repr__(self) -> str:
        return f"<ServiceRate {self.tokens_per_s} tokens/s>"
