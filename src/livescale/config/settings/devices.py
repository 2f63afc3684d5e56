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
            "Worker processes of this node, one per device. With a `topology`, each of its devices"
            " gets a worker.",
            "",
            0,
            WORKERS_MAX,
            is_common=True,
        ),
    ] = 3
    device: Annotated[
        str,
        About(
            "Compute device of a worker. cuda is untested on GPUs. vllm computes with the vLLM"
            " engine of `worker_python`. timed waits as long as a computation would take.",
            choices=("cpu", "cuda", "vllm", "timed"),
            is_common=True,
        ),
    ] = "cpu"
    worker_threads: Annotated[int, About("Compute threads of a worker.", "", 1, 1024)] = 1
    worker_python: Annotated[
        str | None,
        About(
            "Python interpreter of the workers on this node, for example of another virtual"
            " environment. The interpreter needs the same version of livescale. With none, workers"
            " run in the interpreter of this command."
        ),
    ] = None
    arena_bytes: Annotated[
        int, About("Parameter memory of a worker.", "bytes", _MIB, _TIB, is_common=True)
    ] = _GIB
    kv_bytes: Annotated[
        int, About("KV cache memory of a worker.", "bytes", 64 * _KIB, _TIB, is_common=True)
    ] = 256 * _MIB
    host_memory_bytes: Annotated[
        int | None,
        About(
            "Host memory of a node for copies of models. With 0, the node keeps no copies. With"
            " none, the node reserves room for the copies of `placement` and for one more model."
            " The copies of models added later may take half of the memory that is then free.",
            "bytes",
            upper=64 * _TIB,
            is_common=True,
        ),
    ] = None
    run_tokens_max: Annotated[
        int, About("Tokens that an instance computes in one step, at most.", "tokens", 1, 1 << 20)
    ] = 128
    timed_profile: Annotated[
        str | None,
        About(
            "Step times of a timed worker. The value is a file of `livescale bench profile`,"
            " linear:RUN_US:TOKEN_US, or roofline:ACCELERATOR:MODEL (roofline:a100:llama-3-8b)."
            " With none, the profile is linear:8000:67."
        ),
    ] = None
