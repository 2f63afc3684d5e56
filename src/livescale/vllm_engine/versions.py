"""The versions of vLLM that were tested, and what each of them can run. vLLM is not imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmVersion:
    """What a version's kernels for CPUs need: KV blocks of so many tokens, or a multiple of it, and
    one of these head sizes."""

    block_tokens: int
    head_sizes: tuple[int, ...]


VERSIONS = {
    "0.32.0": VllmVersion(32, (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),
}
"""By the release's number, without the part that names a build ("+cpu")."""

NEWEST = max(VERSIONS, key=lambda release: tuple(map(int, release.split("."))))


def release_of(version: str) -> str:
    """The release that a build is of."""
    return version.partition("+")[0]


def is_for_cpus(version: str) -> bool:
    """The build computes on CPUs."""
    return version.partition("+")[2].startswith("cpu")
