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
        About(
            "File of the run record. The pool compresses a record whose name ends in .zst. With"
            " none, the pool writes no record.",
            is_common=True,
        ),
    ] = None
    record_members: Annotated[
        str | None,
        About(
            "Folder of the records of workers and host agents. The records include prompts. Each"
            " start writes into a new subfolder. With none, the pool writes no such records."
        ),
    ] = None
    state: Annotated[
        str | None,
        About(
            "Folder of models and limits that survive a restart. With none, a restart loses models"
            " and limits that were set while the pool ran.",
            is_common=True,
        ),
    ] = None
    log_level: Annotated[
        str,
        About(
            "Lowest level of log lines. The pool prints its events unless this is error.",
            choices=("debug", "info", "warning", "error"),
            is_common=True,
        ),
    ] = "warning"
    drain_timeout_s: Annotated[
        int,
        About(
            "Drain timeout of a pool that stops. Requests that run longer are ended.",
            "s",
            0,
            86_400,
        ),
    ] = 30
