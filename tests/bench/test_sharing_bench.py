"""`bench sharing`: rows of tiny loads; what they mean, not how large they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from livescale.lab.bench.pools.sharing import SHARING
from livescale.main import main

FIELDS = {
    *("system", "devices", "attainment", "worst_model_attainment", "attainment_of_models"),
    *("ttft_p99_s", "tbt_p99_s", "requests", "failed", "serving_s", "spare_s", "idle_s"),
    *("peaks", "priorities", "preferred_attainment", "other_attainment"),
}
CASES = [(peaks, on) for peaks in ("as-they-are", "aligned", "shifted") for on in (False, True)]
WORKLOAD = """
seconds: 20
models:
  - {model: llama-3-8b, name: steady, gamma: {input: 500, output: 20}, rate: 2}
  - model: llama-3-8b
    name: bursts
    gamma: {cv: 4, input: 2000, output: 20}
    rate: 4
    slo: "ttft=1s"
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("LIVESCALE_DATA", raising=False)
    (tmp_path / "two.yaml").write_text(WORKLOAD)

    def ran(*words: object) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        texts = ["--workload", tmp_path / "two.yaml", *words, "--json", file]
        assert main(["bench", "sharing", *map(str, texts)]) == 0
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return ran


def test_every_system_has_a_row_for_every_size(bench: Any) -> None:
    figures = bench("--devices", "2,4")
    rows = figures["rows"]
    assert [(row["system"], row["peaks"], row["priorities"], row["devices"]) for row in rows] == [
        (name, *case, count)
        for name in SHARING
        for case in (CASES if name == "livescale" else CASES[:1])
        for count in (2, 4)
    ]
    for row in rows:
        assert set(row) == FIELDS
        each = row["attainment_of_models"]
        assert set(each) == {"steady", "bursts"}
        assert row["worst_model_attainment"] == min(each.values())
        assert min(each.values()) <= row["attainment"] <= max(each.values())
        assert row["failed"] == 0
    assert len({row["requests"] for row in rows}) == 1


def test_the_smallest_pools_are_those_that_keep_the_promise(bench: Any) -> None:
    figures = bench("--devices", "2,3,4,8", "--systems", "livescale,fixed-full")
    own = figures["dedicated"]
    assert figures["dedicated_devices"] == sum(own.values())
    assert all(1 <= devices <= 8 for devices in own.values())
    smallest = figures["smallest"]
    assert set(smallest) == {"livescale", "fixed-full"}
    assert smallest["livescale"] is not None
    assert figures["devices_share"] == smallest["livescale"] / figures["dedicated_devices"]


def test_cases_are_played_by_every_system_that_is_named(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--devices 2,3 --systems livescale,stop --peaks aligned,shifted --priorities on,off"
    figures = bench(*words.split())
    told = capsys.readouterr().out
    rows = figures["rows"]
    assert [(row["system"], row["peaks"], row["priorities"], row["devices"]) for row in rows] == [
        (name, *case, count)
        for name in ("livescale", "stop")
        for case in CASES[2:]
        for count in (2, 3)
    ]
    assert figures["preferred"] == ["steady"]
    for row in rows:
        each = row["attainment_of_models"]
        halves = row["preferred_attainment"], row["other_attainment"]
        assert halves == (each["steady"], each["bursts"])
        assert row["failed"] == 0
    assert len({row["requests"] for row in rows}) == 1
    # No system played the load as it is, which is what the smallest pools count for.
    assert figures["smallest"] == {}
    assert figures["devices_share"] is None
    assert [(one["system"], one["peaks"]) for one in figures["smallest_of_cases"]] == [
        (name, peaks) for name in ("livescale", "stop") for peaks, _ in CASES[2:]
    ]
    assert "a higher one: steady" in told
    assert "stop, peaks shifted, priorities on" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--peaks", "together"), "together"),
        (("--priorities", "high"), "--priorities"),
        (("--devices", "8,4"), "ascending"),
        (("--devices", "x"), "--devices"),
        (("--systems", "fastest"), "fastest"),
        (("--per-host", "0"), "--per-host"),
        (("--seconds", "30"), "Remove --seconds"),
        (("--slo", "soon"), "soon"),
        (("--devices", "1,4"), "1 device for 2 models"),
    ],
)
def test_bad_flags_are_named(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "two.yaml").write_text(WORKLOAD)
    assert main(["bench", "sharing", "--workload", str(tmp_path / "two.yaml"), *words]) == 1
    assert said in capsys.readouterr().err
