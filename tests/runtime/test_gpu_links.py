"""The table of `nvidia-smi topo --matrix`, as machines of several kinds print it."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_files import LEGEND, make_program

from livescale.runtime.supervisor.gpu_links import (
    Gpu,
    GpuLinksError,
    nvlink_groups,
    parse_gpus,
    read_gpus,
)

ALL = tuple(f"GPU{n}" for n in range(8))


def switched(nvlinks: str = "NV18") -> str:
    """Eight GPUs behind switches, and a card, as recent drivers print them: a heading with an
    escape sequence, tabs, and two more columns."""
    heading = "\t".join(["\t\x1b[4mGPU0", *ALL[1:], "NIC0", "CPU Affinity", "NUMA Affinity"])
    lines = [f"{heading}\tGPU NUMA ID\x1b[0m"]
    for n, name in enumerate(ALL):
        ways = [" X " if n == other else nvlinks for other in range(8)]
        near = "0-55,112-167\t0" if n < 4 else "56-111,168-223\t1"
        lines.append("\t".join([name, *ways, "PIX" if n == 0 else "SYS", near, "\tN/A"]))
    lines.append("\t".join(["NIC0", "PIX", *["SYS"] * 7, " X "]))
    return "\n".join(lines) + LEGEND


MESH = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    mlx5_0  CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     PIX     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     PIX     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     PHB     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     PHB     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     SYS     20-39,60-79
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     SYS     20-39,60-79
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     SYS     20-39,60-79
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      SYS     20-39,60-79
mlx5_0  PIX     PIX     PHB     PHB     SYS     SYS     SYS     SYS      X
"""
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tPXB\tNODE\t0-31\t0
GPU1\tNV4\t X \tPHB\tNODE\t0-31\t0
GPU2\tPXB\tPHB\t X \tNV4\t0-31\tN/A
GPU3\tNODE\tNODE\tNV4\t X \tN/A\tN/A
"""


def test_switches_join_all() -> None:
    gpus = parse_gpus(switched())
    assert tuple(gpu.name for gpu in gpus) == ALL
    assert nvlink_groups(gpus) == (ALL,)
    assert gpus[0].ways["NIC0"] == "PIX"
    assert (gpus[7].cpus, gpus[7].numa_node) == ("56-111,168-223", 1)


def test_a_mesh_joins_halves() -> None:
    """Each GPU has a link to one of the other half, but not to all of them."""
    gpus = parse_gpus(MESH)
    assert nvlink_groups(gpus) == (ALL[:4], ALL[4:])
    assert gpus[0].has_nvlink("GPU4")
    assert not gpus[0].has_nvlink("GPU5")
    assert not gpus[0].has_nvlink("GPU0")


def test_bridges_join_pairs() -> None:
    gpus = parse_gpus(PAIRS)
    assert nvlink_groups(gpus) == (("GPU0", "GPU1"), ("GPU2", "GPU3"))
    assert [(gpu.cpus, gpu.numa_node) for gpu in gpus[2:]] == [("0-31", None), ("", None)]


def test_no_nvlink_is_no_group() -> None:
    assert nvlink_groups(parse_gpus(switched("NODE"))) == ()
    alone = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-23\t0\t\tN/A\n"
    assert parse_gpus(alone + LEGEND) == (Gpu("GPU0", {}, "0-23", 0),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table of GPUs"),
        ("NVIDIA-SMI has failed because it couldn't communicate", "no table of GPUs"),
        (PAIRS.replace("GPU3\tNODE", "GPX3\tNODE"), "its table of 4 GPUs has 3 rows"),
        (PAIRS.replace("\tPHB\t X \tNV4\t0-31\tN/A", ""), "its row of GPU2 cannot be read"),
        (PAIRS.replace("\tNV4\t X \tN/A\tN/A", "\t0-31\t 1 "), "its row of GPU3 cannot be read"),
    ],
)
def test_what_is_no_such_table(text: str, words: str) -> None:
    with pytest.raises(GpuLinksError, match=words):
        parse_gpus(text)


@pytest.mark.usefixtures("machine")
def test_the_program_is_asked(tmp_path: Path) -> None:
    assert nvlink_groups(read_gpus(make_program(tmp_path / "smi", switched()))) == (ALL,)
    with pytest.raises(GpuLinksError, match="ended with 9: No devices were found"):
        read_gpus(make_program(tmp_path / "bad", "No devices were found", 9))
    with pytest.raises(GpuLinksError, match="there is no /nowhere/nvidia-smi"):
        read_gpus("/nowhere/nvidia-smi")
