"""Fixed values of a pool, found by comparison in the simulator.

Experiments and tests set other values, in code or under `tuning:` of a configuration file. Error
messages for settings with these names are in `removed.py`.
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

    #: Emulated hosts of the workers on this node. Workers of different hosts use sockets.
    hosts: Annotated[int, Meta(ge=1, le=256)] = 1
    #: Engines for different models that a worker of device vllm keeps, each with kv_bytes.
    vllm_engines_max: Annotated[int, Meta(ge=1, le=64)] = 2
    #: Memory of the engines that a worker of device vllm keeps, for KV and copies of parameters. A
    #: worker keeps at least one engine. With none, `vllm_engines_max` is the only limit. [bytes]
    vllm_engines_bytes: Annotated[int, Meta(ge=0, le=70368744177664)] | None = None
    #: Permission to run untested versions of vLLM.
    vllm_any_version: Literal["no", "yes"] = "no"
    #: Fixed time of a step of a timed worker. [us]
    timed_run_us: Annotated[int, Meta(ge=0, le=60000000)] = 8000
    #: Additional time of a timed worker for each token. [us]
    timed_token_us: Annotated[int, Meta(ge=0, le=60000000)] = 67
    #: Layout of parameters in memory. compiled computes on the stored parameters with compiled
    #: kernels, plain with torch. packed makes a second copy. auto uses compiled kernels for Llama,
    #: Mistral, Qwen2 and Qwen3. For other models, auto uses the fastest way measured on this node.
    #: With device vllm, plain uses the stored parameters. Other values use a copy in the layout of
    #: vLLM.
    weights_layout: Literal["auto", "packed", "compiled", "plain"] = "auto"
    #: Part of a worker's arena that keeps first layers of evicted models. With 0, a worker keeps
    #: none. [bytes]
    resident_bytes: Annotated[int, Meta(ge=0, le=1099511627776)] = 0
    #: Tokens of a KV block. [tokens]
    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    #: Largest unit of transfer inside a layer. [bytes]
    chunk_bytes: Annotated[int, Meta(ge=4096, le=16777216)] = _MIB
    #: Send limit of a worker. With none, sends are unlimited. [bytes/s]
    uplink_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    #: Receive limit of a worker. With none, receives are unlimited. [bytes/s]
    downlink_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    #: Time without a byte before a receiver requests parameters from another source. [ms]
    stall_ms: Annotated[int, Meta(ge=100)] = 2000
    #: Longest duration of one task of a worker or host agent. A longer task counts as a lost
    #: process. [ms]
    stuck_after_ms: Annotated[int, Meta(ge=1000, le=86400000)] = 60_000
    #: Largest share of a limited uplink for parameters. [%]
    parameter_share_percent: Percent = 100
    #: Multicast strategy.
    multicast: str = "auto"
    #: Planning around links that transfer rows and KV. avoid selects other links of the same speed.
    #: ignore is for comparison.
    serving_links: Literal["avoid", "ignore"] = "avoid"
    #: Eviction order of parameters on released workers. needed keeps those that the recent bursts
    #: of their models need. recent keeps those used last. slow-links keeps those behind slow links.
    #: off keeps none.
    warm_spares: Literal["needed", "recent", "slow-links", "off"] = "needed"
    #: Preload models onto idle workers, and onto spares that are worth less (`empty`), or do not
    #: (`none`).
    spares_ahead: Literal["empty", "none"] = "empty"
    #: Idle time before an instance is drained if it leaves a warm spare. The shorter of this and
    #: `idle_s` applies. [ms]
    spare_idle_ms: Count = 1000
    #: Longest load without live scaling. With none, a quarter of the SLO's TTFT, or 100 if the SLO
    #: is relative. [ms]
    live_over_ms: Annotated[int, Meta(ge=0, le=3600000)] | None = None
    #: Pairs of a loading instance and an overloaded one. With auto, LiveScale pairs two instances
    #: only if the predicted gain exceeds the transfer cost. always pairs every loading instance.
    live_pairs: Literal["auto", "always"] = "auto"
    #: KV of running requests when a team ends. move transfers KV from all workers of the team to
    #: one instance. anew computes KV again. cheaper selects the faster way.
    team_end: Literal["cheaper", "move", "anew"] = "cheaper"
    #: Requests sent to a loading instance before its pair has KV for them. [requests]
    live_ahead_max: Annotated[int, Meta(ge=1, le=4096)] = 8
    #: Prompt batches in progress on a loading instance. [batches]
    live_batches_max: Annotated[int, Meta(ge=1, le=4096)] = 16
    #: Longest delay of decodes by batches of loading instances. With none, the time of a step full
    #: of prompts. [ms]
    live_gap_ms: Annotated[int, Meta(ge=1, le=60000)] | None = None
    #: Decoding requests when a loading instance has the whole model. stay keeps them. move
    #: transfers requests with their KV if the predicted gain exceeds the cost.
    live_migration: Literal["stay", "move"] = "stay"
    #: Running requests of a drained instance. finish runs them to the end. move transfers requests
    #: to other instances of the model, with a pause of at most live_gap_ms.
    drain: Literal["finish", "move"] = "move"
    #: Time that placement cache keeps an unused copy. [s]
    cache_ttl_s: Annotated[int, Meta(ge=1, le=31536000)] = 30
    #: Read limit of a process for model files. With none, reads are unlimited. [bytes/s]
    storage_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    #: Requests that an instance computes at once. [requests]
    sequences_max: Annotated[int, Meta(ge=1, le=65536)] = SEQUENCES_MAX
    #: Share of prompt work for the oldest prompt. Shorter prompts get the rest. [%]
    oldest_prompt_percent: Percent = 50
    #: KV room reserved for each running request before another is admitted. [tokens]
    growth_tokens: Annotated[int, Meta(ge=0, le=1048576)] = 64
    #: Time at which requests are bound to an instance. late binds the requests that the instance
    #: computes next. early binds all requests that its KV has room for.
    binding: Literal["late", "early"] = "late"
    #: With late binding, queued steps of prompt tokens on an instance. [steps]
    runs_ahead_max: Annotated[int, Meta(ge=1, le=4096)] = 2
    #: With late binding, requests that may overtake an earlier one of their client. [requests]
    passes_max: Annotated[int, Meta(ge=1, le=1048576)] = 1 << 16
    #: Requests sent to an instance before their first token. With early binding, at most 8 before
    #: they have KV. [requests]
    dispatched_ahead_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    #: Largest number of queued prompt tokens. Further requests are rejected. With none, the queue
    #: is unlimited. [tokens]
    queue_prompt_tokens_max: Count | None = 1 << 20
    #: Longest time to receive a request from a client. [s]
    receive_timeout_s: Annotated[int, Meta(ge=1, le=86400)] = 60
    #: Longest time that a client does not read. The gateway then disconnects the client. [s]
    stalled_client_s: Annotated[int, Meta(ge=1, le=86400)] = 60
    #: Shortest time between two controller steps. [us]
    step_gap_us: Annotated[int, Meta(ge=0, le=1000000)] = 1000
    #: Window of the token rate. [ms]
    load_window_ms: Annotated[int, Meta(ge=10, le=3600000)] = 1000
    #: Arriving prompt tokens above which a model grows. [% of capacity]
    token_rate_upper_percent: Annotated[int, Meta(ge=1, le=1000)] = 90
    #: Arriving prompt tokens below which a model may shrink. [% of capacity]
    token_rate_lower_percent: Annotated[int, Meta(ge=0, le=1000)] = 60
    #: Queued prefill work above which a model grows. [ms]
    prefill_queue_upper_ms: Annotated[int, Meta(ge=1, le=3600000)] = 700
    #: Queued prefill work below which a model may shrink. [ms]
    prefill_queue_lower_ms: Annotated[int, Meta(ge=0, le=3600000)] = 500
    #: KV blocks in use above which a model grows. [%]
    kv_upper_percent: Percent = 85
    #: KV blocks in use below which a model may shrink. [%]
    kv_lower_percent: Count = 75
    #: Unfinished requests above which a model grows. [% of sequences_max]
    requests_upper_percent: Annotated[int, Meta(ge=1, le=100)] = 85
    #: Unfinished requests below which a model may shrink. [% of sequences_max]
    requests_lower_percent: Annotated[int, Meta(ge=1, le=100)] = 75
    #: Target number of unfinished requests per instance. With none, models scale by scaling_policy.
    #: [requests]
    target_ongoing_requests: Positive | None = None
    #: With scaling_policy stages, time between two decisions about a model's stages. [ms]
    stage_period_ms: Annotated[int, Meta(ge=10, le=3600000)] = 1_000
    #: With cores_profile, CPU cores of all workers of a host. With none, the cores of this node.
    cores_max: Annotated[int, Meta(ge=1, le=4096)] | None = None
    #: Target TTFT. With none, the TTFT of the SLO. A relative SLO targets queues of 2/3 of a step.
    #: [ms]
    ttft_aim_ms: Annotated[int, Meta(ge=1, le=3600000)] | None = None
    #: With scaling_policy slo, time in which the floor of instances falls from the last peak to
    #: zero. [ms]
    floor_decay_ms: Annotated[int, Meta(ge=0, le=86400000)] = 2_000
    #: Time to wait at start for all workers to join. [ms]
    settle_ms: Annotated[int, Meta(ge=0, le=3600000)] = 1000
    #: Attempts of a request after lost workers. [attempts]
    request_attempts_max: Annotated[int, Meta(ge=1, le=100)] = 3
    #: Size at which the next part of the run record begins (FILE.2.jsonl, …). With none, a record
    #: has one part. [bytes]
    record_bytes_max: Annotated[int, Meta(ge=65536, le=1099511627776)] | None = _GIB
