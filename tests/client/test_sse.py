"""Server-sent events, however the network cuts them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.lab.client.completion import EVENT_BYTES_MAX, SseError, SseParser

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


@given(
    events=st.lists(st.lists(texts, min_size=1, max_size=3), max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    space=st.sampled_from([" ", ""]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_cuts_do_not_matter(events: list[list[str]], end: str, space: str, cuts: list[int]) -> None:
    lines = [
        f": comment{end}event: token{end}"
        + "".join(f"data:{space or ' ' * line.startswith(' ')}{line}{end}" for line in event)
        + end
        for event in events
    ]
    stream = "".join(lines).encode()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parser = SseParser()
    got = [e for start, stop in itertools.pairwise(edges) for e in parser.push(stream[start:stop])]
    assert got == ["\n".join(event).encode() for event in events]
    assert repr(parser) == "<SseParser 0 bytes of an incomplete event>"


def test_an_incomplete_event_is_kept_and_bounded() -> None:
    parser = SseParser()
    assert parser.push(b"data: a") == []
    assert parser.push(b"\ndata: b\n") == []
    with pytest.raises(SseError, match="longer than"):
        parser.push(b"data: " + b"x" * EVENT_BYTES_MAX)


def test_blank_lines_make_no_events() -> None:
    assert SseParser().push(b"\n\n: keep-alive\n\ndata: x\n\n\n\n") == [b"x"]
