"""How the GPUs of this machine are joined, as `nvidia-smi topo --matrix` tells it: a table of the
ways between all GPUs and network cards, and the processors that are near to each.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from livescale.values.types import Value

PROGRAM = "nvidia-smi"
_ANSWER_S = 30.0
# Headings are underlined, into a pipe as well.
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|[a-z]\w*_\d+")
_WAY = re.compile(r"[A-Z]+\d*|N/A")
_NVLINK = re.compile(r"NV\d+")


class GpuLinksError(Exception):
    """The GPUs' links are not known; the message says why."""


class Gpu(Value, frozen=True):
    """A GPU, and the way to each other device of the machine: `NV#` over that many NVLinks, `PIX`,
    `PXB`, `PHB`, `NODE` and `SYS` over more and more of the machine. Near to it are `cpus` and
    `numa_node` (None: not told)."""

    name: str
    ways: dict[str, str]
    cpus: str = ""
    numa_node: int | None = None

    def has_nvlink(self, other: str) -> bool:
        return _NVLINK.fullmatch(self.ways.get(other, "")) is not None


def nvlink_groups(gpus: tuple[Gpu, ...]) -> tuple[tuple[str, ...], ...]:
    """GPUs of which each has NVLink to every other one, with the lowest numbers together; a GPU
    without is in none. Switches join all of a machine, some older machines only halves."""
    groups: list[list[Gpu]] = []
    for gpu in gpus:
        joined = [group for group in groups if all(gpu.has_nvlink(mate.name) for mate in group)]
        if joined:
            joined[0].append(gpu)
        else:
            groups.append([gpu])
    return tuple(tuple(gpu.name for gpu in group) for group in groups if len(group) > 1)


def read_gpus(program: str = PROGRAM) -> tuple[Gpu, ...]:
    """Those that the driver's own program tells of. Raises GpuLinksError."""
    path = shutil.which(program)
    if path is None:
        raise GpuLinksError(f"there is no {program}")
    try:
        done = subprocess.run(
            [path, "topo", "--matrix"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise GpuLinksError(f"{program} gives no answer: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise GpuLinksError(f"{program} ended with {done.returncode}: {said[-1]}")
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs of the table, in its order. Raises GpuLinksError for another text."""
    rows = [line.split() for line in _ESCAPE.sub("", text).splitlines()]
    start = next((n for n, row in enumerate(rows) if row and row[0] == "GPU0"), None)
    if start is None:
        raise GpuLinksError("its answer has no table of GPUs")
    heading = rows[start]
    devices = heading[: next((n for n, w in enumerate(heading) if not _DEVICE.fullmatch(w)), None)]
    gpus = []
    for row in rows[start + 1 :]:
        if not row or row[0] not in devices:
            break
        if row[0].startswith("GPU"):
            gpus.append(_gpu(row, devices))
    names = [name for name in devices if name.startswith("GPU")]
    if [gpu.name for gpu in gpus] != names:
        raise GpuLinksError(f"its table of {len(names)} GPUs has {len(gpus)} rows")
    return tuple(gpus)


# -- helpers --------------------------------------------------------------------------------------


def _gpu(row: list[str], devices: list[str]) -> Gpu:
    name, ways, near = row[0], row[1 : len(devices) + 1], row[len(devices) + 1 :]
    if len(ways) < len(devices) or not all(map(_WAY.fullmatch, ways)):
        raise GpuLinksError(f"its row of {name} cannot be read: {' '.join(row)}")
    cpus, numa = [*near, "", ""][:2]
    others = {other: way for other, way in zip(devices, ways, strict=True) if way != "X"}
    return Gpu(
        name,
        others,
        cpus if cpus != "N/A" else "",
        int(numa) if numa.isdecimal() else None,
    )
