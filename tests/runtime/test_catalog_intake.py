"""A gateway on another machine, and the tokenizer files that it has to keep there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_pool_backend import published

from livescale.runtime.gateway_process.catalog_intake import CatalogIntake
from livescale.runtime.wire.protocol import Catalog, ModelFilePart, ReadModelFile
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")


def test_files_that_cannot_be_kept_are_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, say: no other catalog may come, and the gateway is of no use without."""
    place = tmp_path / "files"

    async def story() -> None:
        loop, is_taken = asyncio.get_running_loop(), asyncio.Event()
        intake = CatalogIntake(Catalog(()), str(place), is_taken.set)

        def answer(question: ReadModelFile) -> None:
            loop.call_soon(intake.answer, ModelFilePart(question.call, b"{}", 2))

        place.write_text("a file, in which nothing can be kept")
        intake.receive(Catalog((published("a"),)), answer)
        while "tries again" not in caplog.text:
            assert not is_taken.is_set()
            await asyncio.sleep(0)
        assert str(place) in caplog.text
        place.unlink()
        await is_taken.wait()
        assert [card.name for card in intake.shelf.cards] == ["a"]
        [directory] = place.iterdir()
        assert (directory / "tokenizer.json").read_bytes() == b"{}"

    asyncio.run(asyncio.wait_for(story(), patient(20)))
