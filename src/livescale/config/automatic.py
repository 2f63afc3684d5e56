"""What the machine decides where its user does not: how many workers, and the memory of each.

Pure: sizes in, a configuration and the words about it out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import msgspec

from livescale.common.settings import ConfigError, size_text
from livescale.config.pool import PoolConfig
from livescale.values.types import Value

_MIB = 1 << 20
_WORKERS = 3
"""On processors, where a device is a process: as many as show what scaling is."""
_KV_BYTES = 256 * _MIB
CONTEXTS = 8
"""Requests as long as they may be, for which KV has room."""
AUTOMATIC = dict.fromkeys(("workers", "arena_bytes", "kv_bytes", "host_memory_bytes"), "auto")
"""Settings that `fitted` chooses, each with its default as help and documents show it."""


class ModelNeed(Value, frozen=True):
    """What one model takes: its parameters, and the KV of one request as long as it may be."""

    size_bytes: int
    context_bytes: int


class MachineMemory(Value, frozen=True):
    """What a machine has for a pool: memory that is free, and GPUs (0: workers are processes)."""

    free_bytes: int
    gpus: int = 0


class _Share(Value, frozen=True):
    """One way to divide the memory: `copies_bytes` on the host (None: a place for one more model,
    too), `copy_bytes` for the second copy of parameters that some layouts make."""

    arena_bytes: int
    copies_bytes: int | None
    copy_bytes: int


def fitted(
    config: PoolConfig, given: Container[str], needs: Sequence[ModelNeed], machine: MachineMemory
) -> tuple[PoolConfig, str]:
    """The configuration with what was not given, and one sentence that says it and why.

    Room for the largest model and another one beside it comes first, then a place for one more
    copy on the host, then second copies of parameters (`weights_layout`), then workers, at last
    the copies on the host. KV gets half of what is left, for eight full contexts at most. Raises
    ConfigError where nothing was given and not even one worker fits.
    """
    if not needs or all(name in given for name in AUTOMATIC):
        return config, ""
    largest = max(need.size_bytes for need in needs)
    second = largest if _makes_second_copies(config) else 0
    for workers, share in _ways(config, given, needs, machine):
        copies = share.copies_bytes
        if copies is None:
            copies = sum(need.size_bytes for need in needs) + largest
        left = machine.free_bytes - copies - workers * (share.arena_bytes + share.copy_bytes)
        kv_bytes = _kv_bytes(config, given, needs, left // max(workers, 1), machine.free_bytes)
        if kv_bytes is not None:
            chosen = msgspec.structs.replace(
                config,
                workers=workers,
                arena_bytes=share.arena_bytes,
                kv_bytes=kv_bytes,
                host_memory_bytes=share.copies_bytes,
                weights_layout=config.weights_layout if share.copy_bytes == second else "compiled",
            )
            why = _why(config, chosen, given, needs, machine)
            return chosen, _words(chosen, copies, machine, why)
    if any(name in given for name in AUTOMATIC):
        return config, ""  # what was given does not fit, and is told where it is checked
    raise ConfigError(
        f"this node has {size_text(machine.free_bytes)} of free memory, too little for a model of"
        f" {size_text(largest)} and its KV cache. Free memory, or set arena_bytes, kv_bytes and"
        " workers"
    )


def _ways(
    config: PoolConfig, given: Container[str], needs: Sequence[ModelNeed], machine: MachineMemory
) -> Iterator[tuple[int, _Share]]:
    """From the best to the most frugal."""
    largest = max(need.size_bytes for need in needs)
    copies = sum(need.size_bytes for need in needs)
    least = max(1, sum(model.instances_min for model in config.models))
    counts = range(max(_WORKERS, least), least - 1, -1)
    if "workers" in given or config.listen is not None:
        counts = range(config.workers, config.workers - 1, -1)
    elif machine.gpus:
        counts = range(machine.gpus, machine.gpus - 1, -1)
    second = largest if _makes_second_copies(config) else 0
    roomy = max(config.arena_bytes, _whole_mib(2 * largest))
    arenas = (config.arena_bytes,) if "arena_bytes" in given else (roomy, _whole_mib(largest))
    shares = [_Share(arena, None, second) for arena in arenas]
    shares += [_Share(arenas[-1], copies, second), _Share(arenas[-1], copies, 0)]
    if "host_memory_bytes" in given:
        own = config.host_memory_bytes
        shares = [msgspec.structs.replace(share, copies_bytes=own) for share in shares]
    yield from ((count, share) for count in counts for share in shares)
    if "host_memory_bytes" not in given:
        yield from ((count, _Share(arenas[-1], 0, 0)) for count in counts)


def _makes_second_copies(config: PoolConfig) -> bool:
    return config.device == "cpu" and config.weights_layout in ("auto", "packed")


def _kv_bytes(
    config: PoolConfig,
    given: Container[str],
    needs: Sequence[ModelNeed],
    left_bytes: int,
    free_bytes: int,
) -> int | None:
    """Of one worker, which has so much left for it (None: it is too little: less than one full
    context, or a quarter of the machine's where that is less)."""
    if "kv_bytes" in given or config.device != "cpu":
        return config.kv_bytes if config.kv_bytes <= left_bytes else None
    context = max(need.context_bytes for need in needs)
    if left_bytes < min(context, free_bytes // 4):
        return None
    most = max(_KV_BYTES, _whole_mib(CONTEXTS * context))
    share = max(left_bytes // 2, min(context, left_bytes))
    return min(most, share // _MIB * _MIB)


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes // _MIB) * _MIB


def _why(
    config: PoolConfig,
    chosen: PoolConfig,
    given: Container[str],
    needs: Sequence[ModelNeed],
    machine: MachineMemory,
) -> list[str]:
    """What the best way has that the chosen one does not, as the memory is too little for it."""
    workers, best = next(_ways(config, given, needs, machine))
    copies = sum(need.size_bytes for need in needs)
    lacking = []
    if chosen.workers < workers:
        lacking.append(f"{workers} workers")
    if chosen.arena_bytes < best.arena_bytes:
        lacking.append("a second model on a worker")
    if chosen.host_memory_bytes is not None and chosen.host_memory_bytes < copies:
        lacking.append("copies on the host")
    if chosen.weights_layout != config.weights_layout:
        lacking.append("packed parameters beside the loaded ones (weights_layout)")
    return lacking


def _words(
    config: PoolConfig, copies_bytes: int, machine: MachineMemory, lacking: Sequence[str]
) -> str:
    workers = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    copies = f"{size_text(copies_bytes)} for copies on the host" if copies_bytes else "no host copy"
    why = f". Too little for {', '.join(lacking)}" if lacking else ""
    return (
        f"memory: {size_text(machine.free_bytes)} free: {workers} with"
        f" {size_text(config.arena_bytes)} for parameters and {size_text(config.kv_bytes)} for KV"
        f" each, {copies}{why}"
        " (--help: --workers, --arena-bytes, --kv-bytes, --host-memory-bytes)"
    )
