"""What a pool works with and nobody sets: these values were found by comparing, in the simulator.

Measurements and tests give others, in code or under `tuning:` of a configuration file. What is said
to those who give one as a setting stands in `removed.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from livescale.values.types import SEQUENCES_MAX, Value

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

VLLM_BLOCK_TOKENS = 32
"""Of device vllm: the attention that vLLM has on CPUs needs a multiple of it."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Percent = Annotated[int, Meta(ge=1, le=100)]


class Tuning(Value, frozen=True, kw_only=True):
    """What ablations vary; the simulator's systems have names for it (`sim/pools/systems.py`)."""

    #: hosts that the workers are taken for, all on this machine: sockets between them
    hosts: Annotated[int, Meta(ge=1, le=256)] = 1
    #: engines for different models that a worker of device vllm keeps, each with kv_bytes
    vllm_engines_max: Annotated[int, Meta(ge=1, le=64)] = 2
    #: memory for the engines that a worker of device vllm keeps, KV and copies of parameters; it
    #: has one in any case; none: as many as `vllm_engines_max` says [bytes]
    vllm_engines_bytes: Annotated[int, Meta(ge=0, le=70368744177664)] | None = None
    #: whether a vLLM that was not tested is tried
    vllm_any_version: Literal["no", "yes"] = "no"
    #: time that a timed worker takes for anything it computes [us]
    timed_run_us: Annotated[int, Meta(ge=0, le=60000000)] = 8000
    #: time that a timed worker takes for every token on top [us]
    timed_token_us: Annotated[int, Meta(ge=0, le=60000000)] = 67
    #: auto: a CPU computes Llama, Mistral, Qwen2 and Qwen3 from the parameters as they lie, by
    #: compiled kernels, other models in the way that was fastest when this machine was timed, with
    #: a second copy of what gains by one; packed: all models with a copy; compiled: all without,
    #: by kernels; plain: all without, by torch. Device vllm: plain: as they lie, else as vLLM lays
    #: them out, with a copy
    weights_layout: Literal["auto", "packed", "compiled", "plain"] = "auto"
    #: end of a worker's arena that keeps first layers of models that it gave up; 0: none [bytes]
    resident_bytes: Annotated[int, Meta(ge=0, le=1099511627776)] = 0
    #: tokens of one KV block [tokens]
    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    #: unit of transfer inside a layer, at most [bytes]
    chunk_bytes: Annotated[int, Meta(ge=4096, le=16777216)] = _MIB
    #: limit on what a worker sends; none: no limit [bytes/s]
    uplink_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    #: limit on what a worker receives; none: no limit [bytes/s]
    downlink_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    #: time without a byte after which parameters are asked for elsewhere [ms]
    stall_ms: Annotated[int, Meta(ge=100)] = 2000
    #: time after which a single piece of a worker's or agent's work counts as silence [ms]
    stuck_after_ms: Annotated[int, Meta(ge=1000, le=86400000)] = 60_000
    #: share of a limited uplink that parameters may take at most [%]
    parameter_share_percent: Percent = 100
    #: how parameters get from those who have them to those who need them
    multicast: str = "auto"
    #: link directions that rows and KV cross: plans avoid them where others are as good, or ignore
    #: them, for comparison
    serving_links: Literal["avoid", "ignore"] = "avoid"
    #: which parameters stay longest on released workers, until another model needs the memory:
    #: recent: those used last; slow-links: those whose links are slow; off: none
    warm_spares: Literal["recent", "slow-links", "off"] = "recent"
    #: workers that get parameters before they need any
    spares_ahead: Literal["empty", "none"] = "empty"
    #: like `idle_s`, of instances that leave a warm spare; the shorter counts [ms]
    spare_idle_ms: Count = 1000
    #: loads that should take no longer are waited for; none: a quarter of the SLO's TTFT, or 100
    #: if that is relative [ms]
    live_over_ms: Annotated[int, Meta(ge=0, le=3600000)] | None = None
    #: partners of loading instances: where they pay, or all
    live_pairs: Literal["auto", "always"] = "auto"
    #: when a team ends, KV of requests that decode: move: from all members to the one that gets
    #: the request, anew: it computes it, cheaper: what should be sooner there
    team_end: Literal["cheaper", "move", "anew"] = "cheaper"
    #: requests sent to a loading instance before it or its partner has KV for them [requests]
    live_ahead_max: Annotated[int, Meta(ge=1, le=4096)] = 8
    #: batches of prompts that a loading instance works on [batches]
    live_batches_max: Annotated[int, Meta(ge=1, le=4096)] = 16
    #: time that batches from loading instances may keep decodes waiting; none: no longer than a
    #: Run full of prompts [ms]
    live_gap_ms: Annotated[int, Meta(ge=1, le=60000)] | None = None
    #: when a loading instance has everything, requests that decode stay where they are, or move to
    #: it with their KV where that pays
    live_migration: Literal["stay", "move"] = "stay"
    #: requests of an instance that is given up end there (finish), or move to others of their
    #: model, with a pause no longer than live_gap_ms (move)
    drain: Literal["finish", "move"] = "move"
    #: time after its last use that placement cache keeps a copy [s]
    cache_ttl_s: Annotated[int, Meta(ge=1, le=31536000)] = 30
    #: limit on what a process reads of models; none: no limit [bytes/s]
    storage_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    #: requests that an instance computes at once [requests]
    sequences_max: Annotated[int, Meta(ge=1, le=65536)] = SEQUENCES_MAX
    #: share of prompt work for the oldest prompt; shorter ones get the rest [%]
    oldest_prompt_percent: Percent = 50
    #: room kept for each running request when another is admitted [tokens]
    growth_tokens: Annotated[int, Meta(ge=0, le=1048576)] = 64
    #: late: an instance gets the requests that it computes next, the others wait for whichever
    #: comes free first; early: it gets all that its KV has room for
    binding: Literal["late", "early"] = "late"
    #: with late binding, Runs of prompt tokens that an instance holds and has not computed [Runs]
    runs_ahead_max: Annotated[int, Meta(ge=1, le=4096)] = 2
    #: with late binding, requests that may go before another one of their client that came earlier
    #: [requests]
    passes_max: Annotated[int, Meta(ge=1, le=1048576)] = 1 << 16
    #: requests sent to an instance before their first token; with early binding, before they have
    #: KV there: 8 at most [requests]
    dispatched_ahead_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    #: prompt tokens of those, above which new ones are refused; none: no limit [tokens]
    queue_prompt_tokens_max: Count | None = 1 << 20
    #: time that a client has to send a request [s]
    receive_timeout_s: Annotated[int, Meta(ge=1, le=86400)] = 60
    #: time without reading after which a client is cut off [s]
    stalled_client_s: Annotated[int, Meta(ge=1, le=86400)] = 60
    #: shortest time between two decisions [us]
    step_gap_us: Annotated[int, Meta(ge=0, le=1000000)] = 1000
    #: window over which the token rate is taken [ms]
    load_window_ms: Annotated[int, Meta(ge=10, le=3600000)] = 1000
    #: arriving prompt tokens above which a model grows [% of capacity]
    token_rate_upper_percent: Annotated[int, Meta(ge=1, le=1000)] = 90
    #: arriving prompt tokens below which it may shrink [% of capacity]
    token_rate_lower_percent: Annotated[int, Meta(ge=0, le=1000)] = 60
    #: queued prefill work above which a model grows [ms]
    prefill_queue_upper_ms: Annotated[int, Meta(ge=1, le=3600000)] = 700
    #: queued prefill work below which it may shrink [ms]
    prefill_queue_lower_ms: Annotated[int, Meta(ge=0, le=3600000)] = 500
    #: KV blocks in use above which a model grows [%]
    kv_upper_percent: Percent = 85
    #: KV blocks in use below which it may shrink [%]
    kv_lower_percent: Count = 75
    #: unfinished requests above which a model grows [% of sequences_max]
    requests_upper_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    #: unfinished requests below which it may shrink [% of sequences_max]
    requests_lower_percent: Annotated[int, Meta(ge=1, le=100)] = 75
    #: unfinished requests per instance to scale to; none: by scaling_policy [requests]
    target_ongoing_requests: Positive | None = None
    #: with scaling_policy stages: time between two decisions about a model's stages [ms]
    stage_period_ms: Annotated[int, Meta(ge=10, le=3600000)] = 1_000
    #: with cores_profile: cores of all workers of a host together; none: as many as this machine
    #: has
    cores_max: Annotated[int, Meta(ge=1, le=4096)] | None = None
    #: TTFT to aim at; none: the SLO's, else queues of 2/3 of a Run [ms]
    ttft_aim_ms: Annotated[int, Meta(ge=1, le=3600000)] | None = None
    #: with scaling_policy slo: time in which the least number of instances falls from the last
    #: peak to nothing [ms]
    floor_decay_ms: Annotated[int, Meta(ge=0, le=86400000)] = 2_000
    #: time to wait at start for all workers to join [ms]
    settle_ms: Annotated[int, Meta(ge=0, le=3600000)] = 1000
    #: times a request is tried when workers are lost [attempts]
    request_attempts_max: Annotated[int, Meta(ge=1, le=100)] = 3
    #: size at which a further part of the run record begins (FILE.2.jsonl, …); none: never [bytes]
    record_bytes_max: Annotated[int, Meta(ge=65536, le=1099511627776)] | None = _GIB
