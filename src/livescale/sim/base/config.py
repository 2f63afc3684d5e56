"""What shapes a simulated world. Values only; the run record of a simulation begins with them."""

from __future__ import annotations

import msgspec

from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.reports import REPORT_GAP_NS
from livescale.clusters.topology import Device, Host
from livescale.common.settings import ConfigError, unknown
from livescale.control.state.config import ControllerConfig
from livescale.latency.models import AnyLatency
from livescale.latency.work import LinearLatency
from livescale.values.scaling_policies import CoresModel, ModelPolicy
from livescale.values.types import AGENT_NUMBERS_FROM, ModelSpec, Value, WorkerRef, agent_ref
from livescale.values.units import GBIT_BYTES

SERVING_FIRST, EQUAL = "serving-first", "equal"
LINK_SHARINGS = (SERVING_FIRST, EQUAL)
"""How what workers send each other (rows and KV) and parameters share links."""


class FaultConfig(Value, frozen=True):
    """Faults of a run, drawn from its seed; none happens after `until_ns`.

    A lost worker or agent comes back as its next incarnation after `rejoin_ns`, a lost gateway
    under another name, and without its requests; a lost host takes its agent and all its workers
    with it. Members fall silent for up to `silence_ns_max`
    (`silences`); a member that is silent for `lost_after_ns` is given up. A feed fails with both
    of its ends alive (`feed_failures`), or brings a layer whose bytes are wrong (`corruptions`).
    Nothing comes from a member for `stall_ns` (`stalls`). The files of a model are wrong for
    `bad_files_ns` (`bad_files`). A member refuses whatever it is to hold for `refusal_ns`
    (`refusals`): no memory, or an executor that fails. A member's clock jumps ahead by up to
    `clock_jump_ns_max` (`clock_jumps`), as after a machine was suspended. For `link_ns` a member's
    NIC carries `slow_permille` of its rate (`slow_links`) or nothing at all (`cut_links`). Of 1000
    messages between workers `line_loss_permille` break the line between the two, which do not reach
    one another for `link_ns`, and live on. A controller restart takes `downtime_ns`, and its peers
    need up to `reconnect_ns_max` to find the next one. Of 1000 messages of workers `late_permille`
    are late by up to `late_ns_max` (never out of order), of 1000 progress messages `lost_permille`
    never come, and of 1000 requests `cancelled_permille` are cancelled at some time. Of 1000
    messages that hand a live batch over `pair_loss_permille` lose one of the two workers soon.
    Of 1000 requests `raising_permille` have a position with which the executor raises, and
    `killing_permille` one by which the worker ends that computes it, also after `until_ns`.
    Another controller takes over while the first one lives on (`takeovers`), for up to
    `takeover_ns_max`, in which members and gateways reach one of the two, both or none.
    """

    silences: int = 0
    takeovers: int = 0
    takeover_ns_max: int = 0
    silence_ns_max: int = 0
    lost_after_ns: int = 100_000_000
    worker_losses: int = 0
    agent_losses: int = 0
    gateway_losses: int = 0
    host_losses: int = 0
    feed_failures: int = 0
    corruptions: int = 0
    stalls: int = 0
    stall_ns: int = 0
    slow_links: int = 0
    slow_permille: int = 100
    cut_links: int = 0
    link_ns: int = 0
    bad_files: int = 0
    bad_files_ns: int = 0
    refusals: int = 0
    refusal_ns: int = 0
    clock_jumps: int = 0
    clock_jump_ns_max: int = 0
    rejoin_ns: int = 500_000_000
    controller_restarts: int = 0
    downtime_ns: int = 50_000_000
    reconnect_ns_max: int = 20_000_000
    late_permille: int = 0
    late_ns_max: int = 0
    lost_permille: int = 0
    cancelled_permille: int = 0
    pair_loss_permille: int = 0
    line_loss_permille: int = 0
    raising_permille: int = 0
    killing_permille: int = 0
    until_ns: int = 0


class ModelChange(Value, frozen=True):
    """At this time a model is published (`added`), gets other limits (`changed`), or is withdrawn
    (`removed`)."""

    at_ns: int
    added: ModelPolicy | None = None
    removed: str = ""
    changed: ModelPolicy | None = None


class HostDemand(Value, frozen=True):
    """Hosts that are there when the pool asks for them (`control/cluster/wanted_hosts.py`): every
    `look_ns` it is looked which. One that was asked for is one of these, in this order, and comes
    `placing_ns` later. One that nothing needs for `idle_ns` goes when it is let go, after
    `patience_ns` at the latest."""

    hosts: tuple[str, ...]
    hosts_min: int = 0
    idle_ns: int = 10_000_000_000
    look_ns: int = 1_000_000_000
    placing_ns: int = 0
    patience_ns: int = 10_000_000_000


class HostStay(Value, frozen=True):
    """A host is there from `from_ns` on, and wants to leave at `until_ns` (None: it stays). It goes
    when it is let go, after `patience_ns` at the latest, and is back `away_ns` later."""

    host: str
    from_ns: int = 0
    until_ns: int | None = None
    patience_ns: int = 0
    away_ns: int = 0

    @property
    def end_ns(self) -> int:
        """From then on the host stays."""
        if self.until_ns is None:
            return self.from_ns
        return self.until_ns + self.patience_ns + self.away_ns


class SimConfig(Value, frozen=True):
    """One pool of workers. Times are nanoseconds of virtual time.

    `devices` are the workers' by number. A device that names no host is dealt to the `hosts` in
    turn (each has an agent); without hosts it has one of its own, without an agent. Links are those
    of devices, hosts and the controller's leaves, group and remote storage. `latency` is by model,
    with one core, and `cores` says what more do; the one called "" is that of all others.
    `kv_blocks` None: what fits into a device's `kv_bytes`. An instance that merely goes on reports
    so every `report_gap_ns`. With `coalesces`, Runs in which nothing can change are one event.
    `load_ns` replaces every transfer of parameters to a device by a fixed time (0: instances are
    there at once). A device that receives from another member waits `group_setup_ns` before it asks
    for the first byte, as systems do that form a communication group for every transfer.
    `link_sharing`: "serving-first", rows and KV go before parameters, as in the real data plane,
    and in each class rates are max-min fair; "equal", for comparison, both are one class. Raises
    ConfigError for another one, and where parameters of one class with the others are to leave a
    share of an uplink free.

    Requests come to one of the `gateways` after the other. At each of them at most
    `queue_requests_max` requests of a model wait, with at most `queue_prompt_tokens_max` in
    all (None: any number), and each for `queue_timeout_ns` at a stretch (None: as long as need be).
    There are as many clients as `client_weights`: the first sends every other request, the others
    take turns with the rest. `live` bounds live work on every instance. Workers keep first layers
    of models that they gave up in the last `resident_bytes` of their arenas. `holder_wait_ns` is
    how long a receiver waits for a holder to have what a plan expects, `stall_ns` how long for
    its bytes. Hosts that are neither in `stays` nor in `demand` are there from begin to end; those
    of `demand` join, and have the last workers and agents, in that order. The run is given up as
    stuck when it is not over `grace_ns` after the last arrival and the last fault.
    """

    controller: ControllerConfig
    devices: tuple[Device, ...]
    latency: dict[str, AnyLatency]
    cores: dict[str, CoresModel] = msgspec.field(default_factory=dict)
    hosts: tuple[Host, ...] = ()
    kv_blocks: int | None = None
    block_tokens: int = 16
    run_tokens_max: int = 2048
    oldest_prompt_percent: int = 50
    growth_tokens: int = 64
    queue_requests_max: int = 10_000
    queue_prompt_tokens_max: int | None = None
    queue_timeout_ns: int | None = None
    client_weights: tuple[int, ...] = (1,)
    gateways: int = 1
    step_gap_ns: int = 1_000_000
    message_delay_ns: int = 200_000
    report_gap_ns: int = REPORT_GAP_NS
    coalesces: bool = True
    load_ns: int | None = None
    group_setup_ns: int = 0
    link_sharing: str = SERVING_FIRST
    live: LiveLimits = LiveLimits()
    resident_bytes: int = 0
    holder_wait_ns: int = 2_000_000_000
    stall_ns: int = 500_000_000
    grace_ns: int = 600_000_000_000
    changes: tuple[ModelChange, ...] = ()
    stays: tuple[HostStay, ...] = ()
    demand: HostDemand | None = None
    faults: FaultConfig = FaultConfig()

    def __post_init__(self) -> None:
        if self.link_sharing not in LINK_SHARINGS:
            raise ConfigError(unknown("unknown link_sharing", self.link_sharing, LINK_SHARINGS))
        if self.link_sharing == EQUAL and self.controller.parameter_share_percent != 100:
            raise ConfigError(f"link_sharing '{EQUAL}' knows no parameter_share_percent")

    @property
    def workers(self) -> int:
        return len(self.devices)

    def device(self, number: int) -> Device:
        """The device of a worker, on its host."""
        device = self.devices[number]
        if device.host:
            return device
        host = self.hosts[number % len(self.hosts)].name if self.hosts else f"host-{number}"
        return msgspec.structs.replace(device, host=host)

    def host_of(self, ref: WorkerRef) -> str:
        """The name of the host that a worker or an agent is on."""
        if ref.is_agent:
            return self.hosts[ref.worker - AGENT_NUMBERS_FROM].name
        return self.device(ref.worker).host

    def on_host(self, name: str) -> list[WorkerRef]:
        """The first lives of a host's agent, if there is one, and of its workers."""
        refs = [agent_ref(number) for number in range(len(self.hosts))]
        refs += [WorkerRef(number) for number in range(self.workers)]
        return [ref for ref in refs if self.host_of(ref) == name]

    def latency_of(self, model: str) -> AnyLatency:
        """How long instances of the model take for their Runs."""
        return self.latency[model if model in self.latency else ""]

    def cores_of(self, model: str) -> CoresModel | None:
        """What cores do for the model's Runs (None: nothing)."""
        return self.cores.get(model, self.cores.get(""))

    def batcher(self, spec: ModelSpec, device: Device) -> BatcherConfig:
        """Limits of an instance of the model on such devices."""
        kv_blocks = self.kv_blocks
        if kv_blocks is None:
            kv_blocks = device.kv_bytes // (self.block_tokens * spec.kv_bytes_per_token)
        return BatcherConfig(
            kv_blocks,
            self.block_tokens,
            self.run_tokens_max,
            self.controller.sequences_max,
            self.oldest_prompt_percent,
            self.growth_tokens,
        )

    def spec(self, model: str) -> ModelSpec:
        """The sizes of a model of this world."""
        return next(policy.spec for policy in self.policies if policy.spec.name == model)

    @property
    def policies(self) -> tuple[ModelPolicy, ...]:
        """Every model that is ever served in this world."""
        added = (change.added for change in self.changes)
        return (*self.controller.models, *(policy for policy in added if policy is not None))

    @classmethod
    def default(cls, model: ModelSpec, workers: int = 8) -> SimConfig:
        """One model on workers like the BlitzScale testbed's: 100 Gbit/s links, 10 Gbit/s SSD.

        15,000 prefill tokens per second and 30,000 KV blocks of 16 tokens per instance are the
        authors' figures for an 8B model on an A800; a decode step reads 16 GB of weights and
        131 kB of KV per token of context at about 2 TB/s.
        """
        link = 100 * GBIT_BYTES
        policy = ModelPolicy(
            spec=model,
            instances_min=1,
            instances_max=workers,
            prefill_tokens_per_s=15_000,
            kv_blocks=30_000,
        )
        device = Device(
            kind="a800",
            host="",
            leaf="leaf-0",
            arena_bytes=max(40_000_000_000, model.size_bytes),
            kv_bytes=30_000 * 16 * model.kv_bytes_per_token,
            uplink_bytes_per_s=link,
            downlink_bytes_per_s=link,
        )
        latency = LinearLatency(base_ns=8_000_000, per_token_ns=66_667, per_context_token_ns=65)
        return cls(
            controller=ControllerConfig(
                (policy,), workers_expected=workers, remote_storage_bytes_per_s=10 * GBIT_BYTES
            ),
            devices=(device,) * workers,
            latency={"": latency},
        )
