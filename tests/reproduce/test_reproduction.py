"""`livescale reproduce`: which claims, and what is printed, written and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.lab.reproduce.base.claim import JUDGES, Conditions, Curve, Picture, is_near
from livescale.lab.reproduce.base.figures import as_markdown, draw
from livescale.lab.reproduce.run import CLAIMS, UnknownClaimError, choose, reproduce
from livescale.main import main


@given(ids=st.lists(st.sampled_from(sorted(CLAIMS))))
def test_chosen_claims_come_once_and_in_the_tables_order(ids: list[str]) -> None:
    chosen = [claim.id for claim in choose([name.lower() for name in ids])]
    assert chosen == [name for name in CLAIMS if not ids or name in ids]


@given(ids=st.lists(st.sampled_from(sorted(CLAIMS))), place=st.integers(0, 3))
def test_the_word_all_chooses_every_claim(ids: list[str], place: int) -> None:
    for word in ("all", "ALL"):
        assert choose([*ids[:place], word, *ids[place:]]) == choose([]) == list(CLAIMS.values())


def test_an_unknown_claim_names_the_nearest() -> None:
    with pytest.raises(UnknownClaimError, match=r"'B377' \(nearest: .*B37"):
        choose(["L1", "b377"])
    with pytest.raises(UnknownClaimError, match="'B377'"):
        choose(["all", "b377"])


@given(value=st.floats(-1e6, 1e6), part=st.floats(0, 1))
def test_near_is_a_part_of_what_is_expected(value: float, part: float) -> None:
    assert is_near(value, value, part)
    assert not is_near(value + 2 * abs(value) + 1, value, part)


def test_the_table_has_a_row_per_verdict_and_says_what_is_missing() -> None:
    found = reproduce(choose(["B10", "B35", "B14"]), Conditions())
    lines = as_markdown(found).splitlines()
    rows = [line for line in lines if line.startswith("| B")]
    assert [row.split(" | ")[0] for row in rows] == ["| B10", "| B35"]
    assert rows[0].endswith("| yes |")
    assert rows[1].endswith("| **no** |")
    assert all(row.count("|") == 9 for row in rows)
    assert "| arithmetic | 1 of 2 | 0 of 0 |" in lines
    assert "| pool | 0 of 0 | 0 of 0 |" in lines
    assert any(line.startswith("- B14: ") and "LIVESCALE_DATA" in line for line in lines)


def test_claims_are_counted_apart_by_what_they_judge_and_by_statement() -> None:
    """Nothing is counted twice, and corrected statements never as printed ones."""
    found = reproduce(choose(["B4", "B5", "B8", "B35", "L4", "L17", "Q12"]), Conditions())
    assert str(found.count("printed")) == "3 of 5"
    assert str(found.count("corrected")) == "2 of 2"
    assert str(found.count("printed", "arithmetic")) == "2 of 3"
    assert str(found.count("printed", "planner")) == "1 of 2"
    within = found.as_json()["within"]
    assert isinstance(within, dict)
    for statement in ("printed", "corrected"):
        parts = [within[judges][statement] for judges in JUDGES]
        for key in ("within", "claims"):
            assert sum(part[key] for part in parts) == within["all"][statement][key]
    rows = {line.split(" | ")[0]: line for line in as_markdown(found).splitlines()}
    assert " | planner | corrected: b / k + " in rows["| L4"]
    assert " | arithmetic | printed | " in rows["| Q12"]


def test_the_command_writes_json_and_a_document_with_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIVESCALE_DATA", raising=False)
    json_file, folder = tmp_path / "figures.json", tmp_path / "report"
    arguments = ["reproduce", "L17", "B10", "B13", "--jobs", "1", "--json", str(json_file)]
    # A claim that does not come out (L17) is no failure of the command.
    assert main([*arguments, "--report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "| B10 |" in printed
    figures = json.loads(json_file.read_text())
    assert [target["id"] for target in figures["targets"]] == ["B10", "L17"]
    assert [target["judges"] for target in figures["targets"]] == ["arithmetic", "planner"]
    assert [target["statement"] for target in figures["targets"]] == ["printed", "printed"]
    assert figures["within"]["all"]["printed"] == {"within": 1, "claims": 2}
    for target in figures["targets"]:
        assert {"id", "paper", "ours", "tolerance", "within", "note"} <= set(target)
        assert isinstance(target["within"], bool)
    assert [absent["id"] for absent in figures["absent"]] == ["B13"]
    document = (folder / "reproduction.md").read_text()
    assert printed.strip() in document
    assert "![L17](l17-1.svg)" in document
    assert (folder / "l17-1.svg").read_text().lstrip().startswith("<?xml")


def test_usage_errors_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "B55"]) == 2
    assert "nearest: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        main(["reproduce", "B10", "--seed", "-1"])
    assert raised.value.code == 2
    assert "--seed" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["reproduce", "B10", "--report", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_the_same_picture_gives_the_same_bytes(tmp_path: Path) -> None:
    curves = (Curve("a", ((1.0, 2.0), (2.0, 3.0))), Curve("b", ((1.0, 1.0), (4.0, 0.0)), True))
    picture = Picture("title", "x", "y", curves, is_log_x=True)
    for name in ("one.svg", "two.svg"):
        draw(picture, tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes()
    assert b"<path" in one
