"""Claims in several processes: the same figures, and what they share is made once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from livescale.lab.reproduce.base.claim import Conditions
from livescale.lab.reproduce.base.processes import results
from livescale.lab.reproduce.base.sharing import _Folder, share_through, shared
from livescale.lab.reproduce.run import choose, reproduce


def test_a_result_is_made_once_for_the_same_arguments() -> None:
    calls = []

    @shared(str)
    def made(name: str, part: float = 0.5) -> str:
        calls.append((name, part))
        return f"{name} at {part}"

    assert made("a") == made("a", 0.5) == made("a", part=0.5) == "a at 0.5"
    assert made("a", 0.25) == "a at 0.25"
    assert calls == [("a", 0.5), ("a", 0.25)]


def test_processes_leave_results_for_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Folder, "path", None)
    share_through(tmp_path)
    calls = []

    def function() -> object:
        """As in a process of its own: with nothing in memory."""

        @shared(int)
        def made(number: int) -> int:
            calls.append(number)
            return number + 1

        return made

    for _ in range(3):
        assert function()(1) == 2  # type: ignore[operator]
    assert calls == [1]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: function()(5), range(8)))  # type: ignore[operator]
    assert found == [6] * 8
    assert calls == [1, 5]


@pytest.mark.usefixtures("machine")
def test_two_processes_measure_what_one_does() -> None:
    claims = choose(["B8", "B14", "L2", "L18", "Q12"])
    one, two = (reproduce(claims, Conditions(), processes=count) for count in (1, 2))
    assert one.as_json() == two.as_json()
    assert list(two.absent) == ["B14"]


def test_one_process_begins_nothing() -> None:
    with results(lambda key, conditions: key + 1, [1, 2], Conditions(), 1) as found:
        assert (found(1), found(2)) == (2, 3)
