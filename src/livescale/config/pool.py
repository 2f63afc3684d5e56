"""Configuration: the one table of settings.

The fields of PoolConfig and ModelConfig *are* the table: type, default, unit, bounds and help
stand in one place. Flags and documentation are made from it (`reading.py`). What a value
leads to is decided elsewhere.
"""

from __future__ import annotations

from typing import Annotated

from livescale.common.settings import About, settings_of
from livescale.config.model import ModelConfig
from livescale.values.types import SEQUENCES_MAX, Value

_KIB, _MIB, _GIB, _TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

WORKERS_MAX = 4096
GATEWAYS_MAX = 64
ROOFLINE_PREFIX = "roofline:"
"""What a `timed_profile` begins with that is no file."""


class PoolConfig(Value, frozen=True, kw_only=True):
    """All settings of a pool. Made by `load_config`, which also checks them."""

    host: Annotated[str, About("address that the HTTP API listens on")] = "127.0.0.1"
    port: Annotated[int, About("port of the HTTP API; 0 takes a free one", upper=65535)] = 8000
    gateways: Annotated[
        int,
        About(
            "processes that serve the HTTP API on this port, on one machine; a core each serves"
            " most streams",
            "",
            1,
            GATEWAYS_MAX,
        ),
    ] = 1
    workers: Annotated[
        int,
        About("worker processes, one per device, or those of `topology`", "", 0, WORKERS_MAX),
    ] = 3
    hosts: Annotated[
        int,
        About(
            "hosts that the workers are taken for, all on this machine: sockets between them",
            "",
            1,
            256,
        ),
    ] = 1
    listen: Annotated[
        str | None, About("ADDRESS:PORT that other machines join the pool at; none: none may join")
    ] = None
    token_file: Annotated[
        str | None,
        About(
            "file of mode 0600 with the pool's secret, made where it is missing; none: a new secret"
            " for each start"
        ),
    ] = None
    tls_dir: Annotated[
        str | None,
        About(
            "folder with this machine's certificate and key (`livescale cluster`): TLS between all"
            " processes of the pool; none: plain text"
        ),
    ] = None
    data_plane_tls: Annotated[
        str,
        About(
            "with tls_dir, parameters between machines: auto: encrypted; off: plain, and compared"
            " with their SHA-256; on: encrypted between processes of one machine, too",
            choices=("off", "auto", "on"),
        ),
    ] = "auto"
    ssl_certfile: Annotated[
        str | None, About("certificate chain (PEM) of the HTTP API, which is HTTPS then")
    ] = None
    ssl_keyfile: Annotated[str | None, About("key (PEM) of that certificate")] = None
    heads: Annotated[
        str | None,
        About("ADDRESS:PORT of every head that may act, with commas; none: there is one"),
    ] = None
    lease: Annotated[
        str | None,
        About(
            "which head acts: a file that all of them reach, or kubernetes:[NAMESPACE/]NAME; none:"
            " this one does"
        ),
    ] = None
    lease_ms: Annotated[
        int, About("after so long without its holder another head acts", "ms", 300, 600_000)
    ] = 3000
    topology: Annotated[
        str | None, About("file of hosts, devices and links; none: one host without limits")
    ] = None
    rack: Annotated[
        str,
        About(
            "leaf switch that this machine hangs on, and hosts that join and name none; empty:"
            " leaf0"
        ),
    ] = ""
    racks: Annotated[
        str | None,
        About("file that says in which racks hosts are that join and name none; none: see `rack`"),
    ] = None
    worker_python: Annotated[
        str | None,
        About(
            "interpreter that workers of this machine run in, such as another virtual"
            " environment's with the same livescale; none: the one of this command"
        ),
    ] = None
    worker_threads: Annotated[int, About("compute threads of a worker", "", 1, 1024)] = 1
    device: Annotated[
        str,
        About(
            "what a worker computes on; cuda: not yet tried on a GPU; vllm: with the engine of"
            " that name, which `worker_python` has; timed: it only waits",
            choices=("cpu", "cuda", "vllm", "timed"),
        ),
    ] = "cpu"
    vllm_engines_max: Annotated[
        int,
        About(
            "engines for different models that a worker of device vllm keeps, each with kv_bytes",
            "",
            1,
            64,
        ),
    ] = 2
    vllm_engines_bytes: Annotated[
        int | None,
        About(
            "memory for the engines that a worker of device vllm keeps, KV and copies of"
            " parameters; it has one in any case; none: as many as `vllm_engines_max` says",
            "bytes",
            upper=64 * _TIB,
        ),
    ] = None
    vllm_any_version: Annotated[
        str, About("whether a vLLM that was not tested is tried", choices=("no", "yes"))
    ] = "no"
    timed_run_us: Annotated[
        int, About("time that a timed worker takes for anything it computes", "us", 0, 60_000_000)
    ] = 8000
    timed_token_us: Annotated[
        int, About("time that a timed worker takes for every token on top", "us", 0, 60_000_000)
    ] = 67
    timed_profile: Annotated[
        str | None,
        About(
            "instead of these two: a file of `bench profile`, or roofline:ACCELERATOR:MODEL, such"
            " as roofline:a100:llama-3-8b"
        ),
    ] = None
    weights_layout: Annotated[
        str,
        About(
            "auto: a CPU computes Llama, Mistral, Qwen2 and Qwen3 from the parameters as they lie,"
            " by compiled kernels, other models in the way that was fastest when this machine was"
            " timed, with a second copy of what gains by one; packed: all models with a copy;"
            " compiled: all without, by kernels; plain: all without, by torch. Device"
            " vllm: plain: as they lie, else as vLLM lays them out, with a copy",
            choices=("auto", "packed", "compiled", "plain"),
        ),
    ] = "auto"
    arena_bytes: Annotated[int, About("memory for parameters, per worker", "bytes", _MIB, _TIB)] = (
        _GIB
    )
    resident_bytes: Annotated[
        int,
        About(
            "end of a worker's arena that keeps first layers of models that it gave up; 0: none",
            "bytes",
            0,
            _TIB,
        ),
    ] = 0
    kv_bytes: Annotated[
        int, About("memory for the KV cache, per worker", "bytes", 64 * _KIB, _TIB)
    ] = 256 * _MIB
    block_tokens: Annotated[int, About("tokens of one KV block", "tokens", 1, 1024)] = 16
    chunk_bytes: Annotated[
        int, About("unit of transfer inside a layer, at most", "bytes", 4 * _KIB, 16 * _MIB)
    ] = _MIB
    uplink_bytes_per_s: Annotated[
        int | None, About("limit on what a worker sends; none: no limit", "bytes/s", _KIB)
    ] = None
    downlink_bytes_per_s: Annotated[
        int | None, About("limit on what a worker receives; none: no limit", "bytes/s", _KIB)
    ] = None
    carrier: Annotated[
        str,
        About(
            "auto: shared memory within a host, TCP between hosts; tcp: no shared memory; nixl:"
            " NIXL instead of TCP, for RDMA networks (extra rdma)",
            choices=("auto", "tcp", "nixl"),
        ),
    ] = "auto"
    stall_ms: Annotated[
        int,
        About("time without a byte after which parameters are asked for elsewhere", "ms", 100),
    ] = 2000
    lost_after_ms: Annotated[
        int,
        About(
            "silence after which a worker, an agent, the controller or a gateway is given up",
            "ms",
            200,
            3_600_000,
        ),
    ] = 5000
    stuck_after_ms: Annotated[
        int,
        About(
            "time after which a single piece of a worker's or agent's work counts as silence",
            "ms",
            1000,
            86_400_000,
        ),
    ] = 60_000
    parameter_share_percent: Annotated[
        int, About("share of a limited uplink that parameters may take at most", "%", 1, 100)
    ] = 100
    multicast: Annotated[
        str, About("how parameters get from those who have them to those who need them")
    ] = "auto"
    serving_links: Annotated[
        str,
        About(
            "link directions that rows and KV cross: plans avoid them where others are as good, or"
            " ignore them, for comparison",
            choices=("avoid", "ignore"),
        ),
    ] = "avoid"
    warm_spares: Annotated[
        str,
        About(
            "which parameters stay longest on released workers, until another model needs the"
            " memory: recent: those used last; slow-links: those whose links are slow; off: none",
            choices=("recent", "slow-links", "off"),
        ),
    ] = "recent"
    spares_ahead: Annotated[
        str, About("workers that get parameters before they need any", choices=("empty", "none"))
    ] = "empty"
    spare_idle_ms: Annotated[
        int,
        About("like `idle_s`, of instances that leave a warm spare; the shorter counts", "ms", 0),
    ] = 1000
    live_order: Annotated[
        str,
        About(
            "how a loading instance works before everything is there: zigzag and best-effort share"
            " prompts with an overloaded instance, overlap works alone, stop-the-world waits",
            choices=("zigzag", "best-effort", "overlap", "stop-the-world"),
        ),
    ] = "zigzag"
    live_over_ms: Annotated[
        int | None,
        About(
            "loads that should take no longer are waited for; none: a quarter of the SLO's TTFT,"
            " or 100 if that is relative",
            "ms",
            0,
            3_600_000,
        ),
    ] = None
    live_pairs: Annotated[
        str,
        About("partners of loading instances: where they pay, or all", choices=("auto", "always")),
    ] = "auto"
    teams: Annotated[
        str,
        About(
            "loading instances that serve together before any of them has everything: cover: as few"
            " as have the whole model between them, pairs: one of each source's, none: no teams."
            " By multicast binomial, whose instances get different parts first; with auto those"
            " loads go that way that should have first tokens sooner so",
            choices=("none", "cover", "pairs"),
        ),
    ] = "none"
    team_end: Annotated[
        str,
        About(
            "when a team ends, KV of requests that decode: move: from all members to the one that"
            " gets the request, anew: it computes it, cheaper: what should be sooner there",
            choices=("cheaper", "move", "anew"),
        ),
    ] = "cheaper"
    live_ahead_max: Annotated[
        int,
        About(
            "requests sent to a loading instance before it or its partner has KV for them",
            "requests",
            1,
            4096,
        ),
    ] = 8
    live_batches_max: Annotated[
        int, About("batches of prompts that a loading instance works on", "batches", 1, 4096)
    ] = 16
    live_gap_ms: Annotated[
        int | None,
        About(
            "time that batches from loading instances may keep decodes waiting; none: no longer"
            " than a Run full of prompts",
            "ms",
            1,
            60_000,
        ),
    ] = None
    live_migration: Annotated[
        str,
        About(
            "when a loading instance has everything, requests that decode stay where they are, or"
            " move to it with their KV where that pays",
            choices=("stay", "move"),
        ),
    ] = "stay"
    drain: Annotated[
        str,
        About(
            "requests of an instance that is given up end there (finish), or move to others of"
            " their model, with a pause no longer than live_gap_ms (move)",
            choices=("finish", "move"),
        ),
    ] = "move"
    placement: Annotated[
        str,
        About(
            "copies in host memory: spread: one of each model in the cluster; cache: on each host"
            " what it loaded last; all: every model on every host; key-stages: on each host the"
            " stages that were narrow while it had them, and the last copy of what no device"
            " holds; none",
            choices=("spread", "cache", "all", "key-stages", "none"),
        ),
    ] = "spread"
    cache_ttl_s: Annotated[
        int, About("time after its last use that placement cache keeps a copy", "s", 1, 31_536_000)
    ] = 30
    host_memory_bytes: Annotated[
        int | None,
        About(
            "memory for copies, per host; 0: no agents; none: what placement keeps, and one more;"
            " for models that come later up to half of what the machine has left",
            "bytes",
            upper=64 * _TIB,
        ),
    ] = None
    storage_bytes_per_s: Annotated[
        int | None,
        About("limit on what a process reads of models; none: no limit", "bytes/s", _KIB),
    ] = None
    run_tokens_max: Annotated[
        int, About("tokens that an instance computes at once", "tokens", 1, 1 << 20)
    ] = 128
    sequences_max: Annotated[
        int, About("requests that an instance computes at once", "requests", 1, 1 << 16)
    ] = SEQUENCES_MAX
    oldest_prompt_percent: Annotated[
        int,
        About("share of prompt work for the oldest prompt; shorter ones get the rest", "%", 1, 100),
    ] = 50
    growth_tokens: Annotated[
        int,
        About("room kept for each running request when another is admitted", "tokens", 0, 1 << 20),
    ] = 64
    binding: Annotated[
        str,
        About(
            "late: an instance gets the requests that it computes next, the others wait for"
            " whichever comes free first; early: it gets all that its KV has room for",
            choices=("late", "early"),
        ),
    ] = "late"
    runs_ahead_max: Annotated[
        int,
        About(
            "with late binding, Runs of prompt tokens that an instance holds and has not computed",
            "Runs",
            1,
            4096,
        ),
    ] = 2
    passes_max: Annotated[
        int,
        About(
            "with late binding, requests that may go before another one of their client that came"
            " earlier",
            "requests",
            1,
            1 << 20,
        ),
    ] = 1 << 16
    dispatched_ahead_max: Annotated[
        int,
        About(
            "requests sent to an instance before their first token; with early binding, before"
            " they have KV there: 8 at most",
            "requests",
            1,
            4096,
        ),
    ] = 64
    queue_requests_max: Annotated[
        int, About("waiting requests of a model above which new ones are refused", "requests", 1)
    ] = 1024
    queue_prompt_tokens_max: Annotated[
        int | None,
        About("prompt tokens of those, above which new ones are refused; none: no limit", "tokens"),
    ] = 1 << 20
    queue_timeout_s: Annotated[
        int | None,
        About("time that a request waits for an instance, then it is refused; none: any", "s", 1),
    ] = 60
    request_timeout_s: Annotated[
        int | None,
        About("time from arrival to last token, then a request is ended; none: no limit", "s", 1),
    ] = None
    receive_timeout_s: Annotated[
        int, About("time that a client has to send a request", "s", 1, 86_400)
    ] = 60
    stalled_client_s: Annotated[
        int, About("time without reading after which a client is cut off", "s", 1, 86_400)
    ] = 60
    api_key_file: Annotated[
        str | None,
        About(
            "file of the keys that /v1 asks for, one per line, perhaps with weight=N behind;"
            " none: open to all"
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        About("file of the keys that /admin asks for, one per line; none: see operations.md"),
    ] = None
    cors_origins: Annotated[
        str,
        About("origins of web pages that may use /v1, separated by commas, '*': all; empty: none"),
    ] = ""
    metrics_compat: Annotated[
        str, About("names under which /metrics shows its figures again", choices=("none", "vllm"))
    ] = "none"
    step_gap_us: Annotated[
        int, About("shortest time between two decisions", "us", 0, 1_000_000)
    ] = 1000
    load_window_ms: Annotated[
        int, About("window over which the token rate is taken", "ms", 10, 3_600_000)
    ] = 1000
    token_rate_upper_percent: Annotated[
        int, About("arriving prompt tokens above which a model grows", "% of capacity", 1, 1000)
    ] = 90
    token_rate_lower_percent: Annotated[
        int, About("arriving prompt tokens below which it may shrink", "% of capacity", 0, 1000)
    ] = 60
    prefill_queue_upper_ms: Annotated[
        int, About("queued prefill work above which a model grows", "ms", 1, 3_600_000)
    ] = 700
    prefill_queue_lower_ms: Annotated[
        int, About("queued prefill work below which it may shrink", "ms", 0, 3_600_000)
    ] = 500
    kv_upper_percent: Annotated[
        int, About("KV blocks in use above which a model grows", "%", 1, 100)
    ] = 85
    kv_lower_percent: Annotated[
        int, About("KV blocks in use below which it may shrink", "%", 0, 100)
    ] = 75
    requests_upper_percent: Annotated[
        int,
        About("unfinished requests above which a model grows", "% of sequences_max", 1, 100),
    ] = 85
    requests_lower_percent: Annotated[
        int,
        About("unfinished requests below which it may shrink", "% of sequences_max", 1, 100),
    ] = 75
    target_ongoing_requests: Annotated[
        int | None,
        About(
            "unfinished requests per instance to scale to; none: by scaling_policy", "requests", 1
        ),
    ] = None
    scaling_policy: Annotated[
        str,
        About(
            "what a model scales by; bounds: all bounds above; slo: an aim for the TTFT instead of"
            " the queued prefill work's; stages: each stage of a model by its own queue; pipelines:"
            " all stages alike (models without stages: slo)",
            choices=("bounds", "slo", "stages", "pipelines"),
        ),
    ] = "slo"
    stage_period_ms: Annotated[
        int,
        About(
            "with scaling_policy stages: time between two decisions about a model's stages",
            "ms",
            10,
            3_600_000,
        ),
    ] = 1_000
    cores_profile: Annotated[
        str | None,
        About(
            "with scaling_policy stages: file of `bench cores`; instances of a stage get more cores"
            " where one of them goes that would be missed; none: workers keep their threads"
        ),
    ] = None
    cores_max: Annotated[
        int | None,
        About(
            "with cores_profile: cores of all workers of a host together; none: as many as this"
            " machine has",
            "",
            1,
            4096,
        ),
    ] = None
    ttft_aim_ms: Annotated[
        int | None,
        About("TTFT to aim at; none: the SLO's, else queues of 2/3 of a Run", "ms", 1, 3_600_000),
    ] = None
    floor_decay_ms: Annotated[
        int,
        About(
            "with scaling_policy slo: time in which the least number of instances falls from the"
            " last peak to nothing",
            "ms",
            0,
            86_400_000,
        ),
    ] = 2_000
    scale_down_timeout_ms: Annotated[
        int | None,
        About(
            "time below every lower bound before a model shrinks; none: 100 with scaling_policy"
            " slo, 3000 of a stage, else 333",
            "ms",
            0,
            86_400_000,
        ),
    ] = None
    settle_ms: Annotated[
        int, About("time to wait at start for all workers to join", "ms", 0, 3_600_000)
    ] = 1000
    drain_timeout_s: Annotated[
        int, About("time that running requests get when the pool stops", "s", 0, 86_400)
    ] = 30
    request_attempts_max: Annotated[
        int, About("times a request is tried when workers are lost", "attempts", 1, 100)
    ] = 3
    record: Annotated[
        str | None, About("file for the run record (.zst: compressed); none: no record")
    ] = None
    record_bytes_max: Annotated[
        int | None,
        About(
            "size at which a further part of the run record begins (FILE.2.jsonl, …); none: never",
            "bytes",
            1 << 16,
            _TIB,
        ),
    ] = None
    record_members: Annotated[
        str | None,
        About(
            "directory for records of workers and host agents, prompts included, in a folder"
            " for each start; none: no records"
        ),
    ] = None
    state: Annotated[
        str | None,
        About(
            "directory that keeps models and limits of the running pool for its next start;"
            " none: they go with the pool"
        ),
    ] = None
    slo: Annotated[str, About("what counts as good: '5x-mean' or 'ttft=450ms,tbt=150ms'")] = (
        "5x-mean"
    )
    log_level: Annotated[
        str,
        About(
            "what processes log besides the pool's news",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "warning"
    models: tuple[ModelConfig, ...] = ()


SETTINGS = settings_of(PoolConfig)
