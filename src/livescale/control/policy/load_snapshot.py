"""What a policy looks at, and what it suggests: values only."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class LoadSnapshot(msgspec.Struct, frozen=True):
    """Load of one (model, role) now.

    `instances` counts capacity that serves or is still loading. `window_tokens` are prompt tokens
    that arrived within `window_ns`; `queued_prefill_tokens` wait in the router and on instances;
    `requests` are all unfinished ones. Of these `left_waiting` were left without a place or KV: in
    the router, or on `full_instances`, which run `full_running` others. Besides `kv_blocks_used`,
    up to `kv_blocks_kept` are kept for running requests to grow. Rates, places and KV blocks are
    per instance; None means not known yet. `serving` of the instances serve now, and `resumable`
    ones, which drain or of which a warm spare is there, would do so at once. Runs with prompts did
    `service_tokens_per_s`, and one more load to an instance should take `load_ns` (None: not
    known, or not asked for). At most `instances_max` are allowed (None: any). The link of an
    instance carries the KV of `kv_tokens_per_s` (None: no KV crosses it, or that is not known).
    """

    instances: int
    window_tokens: int
    window_ns: int
    queued_prefill_tokens: int
    kv_blocks_used: int
    prefill_tokens_per_s: int | None
    kv_blocks: int | None
    requests: int = 0
    places: int | None = None
    left_waiting: int = 0
    full_instances: int = 0
    full_running: int = 0
    kv_blocks_kept: int = 0
    now_ns: int = 0
    serving: int = 0
    resumable: int = 0
    service_tokens_per_s: int | None = None
    load_ns: int | None = None
    instances_max: int | None = None
    kv_tokens_per_s: int | None = None

    @property
    def waiting_requests(self) -> int:
        """Requests that have no place or no KV: as many as were left, or more than all places."""
        if self.places is None:
            return self.left_waiting
        return max(self.left_waiting, self.requests - self.places * self.instances)


class Suggestion(msgspec.Struct, frozen=True):
    """How many instances the load needs at the upper (`at_least`) and lower bounds (`at_most`).

    `explain` gives the figures behind it, which are wanted only when the number changes. Down to
    `floor` none goes because of a low load; another model that needs it may have it.
    """

    at_least: int
    at_most: int
    reason: str
    explain: Callable[[], dict[str, int]]
    #: instances to have if there are fewer than `at_least` (None: the middle of both)
    target: int | None = None
    floor: int = 0
    #: instances that would be of use if all were there at once (None: as `at_least`)
    at_once: int | None = None
    #: instances of use that need no load: they come if no model needs their workers more
    spread: int = 0
    #: why instances go if there are more than `at_most`
    low_reason: str = "idle"

    @property
    def grow_to(self) -> int:
        """Instances to have if there are fewer than `at_least`."""
        middle = (self.at_least + self.at_most + 1) // 2
        return max(self.at_least, middle if self.target is None else self.target)
