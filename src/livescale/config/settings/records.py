"""What is written down, and the end of the pool."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.scaling import ScalingSettings


class RecordSettings(ScalingSettings, frozen=True, kw_only=True):
    """What is written down, and the end of the pool."""

    title: ClassVar[str] = "records and logs"

    record: Annotated[
        str | None,
        About("file for the run record; .zst: compressed; none: no record", is_common=True),
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
            "folder that keeps models for the next start; limits, too; none: they go with the pool",
            is_common=True,
        ),
    ] = None
    log_level: Annotated[
        str,
        About(
            "what processes log; besides the pool's news",
            choices=("debug", "info", "warning", "error"),
            is_common=True,
        ),
    ] = "warning"
    drain_timeout_s: Annotated[
        int, About("time that running requests get when the pool stops", "s", 0, 86_400)
    ] = 30
