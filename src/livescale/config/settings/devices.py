"""What workers compute on, and the memory that they take."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.api import ApiSettings

WORKERS_MAX = 4096
_KIB, _MIB, _GIB, _TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class DeviceSettings(ApiSettings, frozen=True, kw_only=True):
    """What workers compute on, and the memory that they take."""

    title: ClassVar[str] = "devices and memory"

    workers: Annotated[
        int,
        About(
            "worker processes, one per device; or those of `topology`",
            "",
            0,
            WORKERS_MAX,
            is_common=True,
        ),
    ] = 3
    device: Annotated[
        str,
        About(
            "what a worker computes on; cuda: not yet tried on a GPU; vllm: with the engine"
            " of that name, which `worker_python` has; timed: it only waits",
            choices=("cpu", "cuda", "vllm", "timed"),
            is_common=True,
        ),
    ] = "cpu"
    worker_threads: Annotated[int, About("compute threads of a worker", "", 1, 1024)] = 1
    worker_python: Annotated[
        str | None,
        About(
            "interpreter that workers of this machine run in, such as another virtual"
            " environment's with the same livescale; none: the one of this command"
        ),
    ] = None
    arena_bytes: Annotated[
        int, About("memory for parameters, per worker", "bytes", _MIB, _TIB, is_common=True)
    ] = _GIB
    kv_bytes: Annotated[
        int, About("memory for the KV cache, per worker", "bytes", 64 * _KIB, _TIB, is_common=True)
    ] = 256 * _MIB
    host_memory_bytes: Annotated[
        int | None,
        About(
            "memory for copies, per host; 0: no agents; none: what placement keeps, and one"
            " more; for models that come later up to half of what the machine has left",
            "bytes",
            upper=64 * _TIB,
            is_common=True,
        ),
    ] = None
    run_tokens_max: Annotated[
        int, About("tokens that an instance computes at once", "tokens", 1, 1 << 20)
    ] = 128
    timed_profile: Annotated[
        str | None,
        About(
            "what a timed worker waits for a Run: a file of `bench profile`,"
            " linear:RUN_US:TOKEN_US, or roofline:ACCELERATOR:MODEL, such as"
            " roofline:a100:llama-3-8b; none:"
            " linear:8000:67"
        ),
    ] = None
