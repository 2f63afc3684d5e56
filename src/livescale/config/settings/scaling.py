"""When models grow and shrink, and how new instances work."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.machines import MachineSettings


class ScalingSettings(MachineSettings, frozen=True, kw_only=True):
    """When models grow and shrink, and how new instances work."""

    title: ClassVar[str] = "scaling"

    slo: Annotated[
        str,
        About(
            "Service level objective (SLO) of every model. The value is a multiple of the mean"
            " (5x-mean) or latency bounds (ttft=450ms,tbt=150ms). Scaling aims at a TTFT bound."
            " A TBT bound limits the prompt tokens that a step computes beside decodes.",
            is_common=True,
        ),
    ] = "5x-mean"
    scaling_policy: Annotated[
        str,
        About(
            "Load measure of the scaling policy. slo scales to a target TTFT. bounds compares token"
            " rate, queued prefill work, KV use and requests with fixed bounds. stages scales each"
            " stage of a model by its own queue. pipelines scales all stages of a model alike."
            " Models without stages scale by slo if the policy is stages or pipelines.",
            choices=("bounds", "slo", "stages", "pipelines"),
        ),
    ] = "slo"
    scale_down_timeout_ms: Annotated[
        int | None,
        About(
            "Scale-down delay. The controller drains an instance after its model was below every"
            " lower bound for this time. With none, the delay is 100 ms with `scaling_policy` slo,"
            " 3000 ms for a stage, and 333 ms otherwise.",
            "ms",
            0,
            86_400_000,
        ),
    ] = None
    live_order: Annotated[
        str,
        About(
            "Live scaling mode of loading instances. zigzag shares prompts layer by layer with an"
            " overloaded instance. overlap computes each layer as it arrives, without a partner."
            " stop-the-world serves after the last layer has arrived.",
            choices=("zigzag", "overlap", "stop-the-world"),
            is_common=True,
        ),
    ] = "zigzag"
    teams: Annotated[
        str,
        About(
            "Teams of loading instances that serve together before each has the whole model. cover"
            " forms teams of as few instances as hold the whole model. pairs takes one instance of"
            " each source. none forms no teams. If a team is predicted to give first tokens sooner"
            " than a chain, the controller loads by binomial multicast.",
            choices=("none", "cover", "pairs"),
        ),
    ] = "none"
    placement: Annotated[
        str,
        About(
            "Model copies in host memory. spread keeps one copy of each model in the cluster."
            " key-stages keeps on each host the stages that were bottlenecks while the host served"
            " them. key-stages also keeps one copy of each model without a copy on a device."
            " none keeps no copies.",
            choices=("spread", "key-stages", "none"),
            is_common=True,
        ),
    ] = "spread"
    cores_profile: Annotated[
        str | None,
        About(
            "File of `livescale bench cores` for `scaling_policy` stages. With a file, the"
            " controller may drain an instance of a stage and give the other instances more CPU"
            " cores. With none, workers keep `worker_threads`."
        ),
    ] = None
