"""When models grow and shrink, and how new instances work."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.machines import MachineSettings


class ScalingSettings(MachineSettings, frozen=True, kw_only=True):
    """When models grow and shrink, and how new instances work."""

    title: ClassVar[str] = "scaling"

    slo: Annotated[
        str, About("what counts as good; '5x-mean' or 'ttft=450ms,tbt=150ms'", is_common=True)
    ] = "5x-mean"
    scaling_policy: Annotated[
        str,
        About(
            "what a model scales by; slo: an aim for the TTFT; bounds: token rate, queued prefill"
            " work, KV and requests; stages: each stage of a model by its own queue; pipelines: all"
            " stages alike (models without stages: slo)",
            choices=("bounds", "slo", "stages", "pipelines"),
        ),
    ] = "slo"
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
    live_order: Annotated[
        str,
        About(
            "how a loading instance works; zigzag: it shares prompts with an overloaded "
            "instance, layer by layer; overlap: alone, behind its own load; stop-the-world:"
            " it waits",
            choices=("zigzag", "overlap", "stop-the-world"),
            is_common=True,
        ),
    ] = "zigzag"
    teams: Annotated[
        str,
        About(
            "loading instances that serve together before any of them has everything: cover: as few"
            " as have the whole model between them, pairs: one of each source's, none: no teams."
            " Loads whose first tokens should be sooner so go by a binomial multicast, in which"
            " instances get different parts first",
            choices=("none", "cover", "pairs"),
        ),
    ] = "none"
    placement: Annotated[
        str,
        About(
            "copies of models in host memory; spread: one of each model in the cluster; "
            "key-stages: on each host the stages that were narrow while it had them, and "
            "the last copy of what no device holds; none",
            choices=("spread", "key-stages", "none"),
            is_common=True,
        ),
    ] = "spread"
    cores_profile: Annotated[
        str | None,
        About(
            "with scaling_policy stages: file of `bench cores`; instances of a stage get more cores"
            " where one of them goes that would be missed; none: workers keep their threads"
        ),
    ] = None
