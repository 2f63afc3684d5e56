"""The small files of models that a gateway on another machine needs: asked for part by part, over
the wire to the controller, and kept in a directory of the gateway's own.

One part is under way at a time: no more than that waits at either end.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec

from livescale.gateway.text.tokenizer_files import TEXT_FILES
from livescale.runtime.wire.protocol import Catalog, CatalogEntry, ModelFilePart, ReadModelFile

_PART_BYTES = 1 << 20
_FILE_BYTES_MAX = 256 << 20


def read_part(directory: str, question: ReadModelFile) -> ModelFilePart:
    """What the controller answers, from the model's `directory`; no other files are read."""
    nothing = ModelFilePart(question.call, b"", None)
    if question.file not in TEXT_FILES or question.offset < 0:
        return nothing
    try:
        with (Path(directory) / question.file).open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(question.offset)
            return ModelFilePart(question.call, file.read(_PART_BYTES), size_bytes)
    except OSError:
        return nothing


class TextFiles:
    """Those that have come. Lives on the gateway's event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: directories of models whose files are all there
        self._complete: dict[Path, None] = {}
        self._asked: dict[str, asyncio.Future[ModelFilePart]] = {}
        self._calls = itertools.count(1)

    def directory_of(self, entry: CatalogEntry) -> Path:
        """Where the model's files are here. Other weights, or another path, are another model."""
        content = msgspec.msgpack.encode((entry.directory, entry.manifest))
        return self._directory / hashlib.sha256(content).hexdigest()

    def has_all(self, catalog: Catalog) -> bool:
        """Nothing of these models is missing here."""
        return all(self.directory_of(model.entry) in self._complete for model in catalog.models)

    async def fetch(self, catalog: Catalog, send: Callable[[ReadModelFile], None]) -> None:
        """Ask for what is missing of these models, and wait until that is here. A file that the
        model does not have, or that is too large, is not here then, either."""
        for model in catalog.models:
            directory = self.directory_of(model.entry)
            if directory not in self._complete:
                directory.mkdir(parents=True, exist_ok=True)
                for file in TEXT_FILES:
                    await self._fetch(model.entry.spec.name, directory / file, send)
                self._complete[directory] = None

    def answer(self, part: ModelFilePart) -> None:
        """The controller has answered; perhaps the answer is not waited for any more."""
        answered = self._asked.get(part.call)
        if answered is not None and not answered.done():
            answered.set_result(part)

    # -- helpers, in the order used -------------------------------------------------------------

    async def _fetch(self, model: str, path: Path, send: Callable[[ReadModelFile], None]) -> None:
        taken = bytearray()
        while True:
            part = await self._ask(model, path.name, len(taken), send)
            taken += part.content
            if part.size_bytes is None or part.size_bytes > _FILE_BYTES_MAX:
                return
            if len(taken) >= part.size_bytes or not part.content:
                await asyncio.to_thread(path.write_bytes, taken)
                return

    async def _ask(
        self, model: str, file: str, offset: int, send: Callable[[ReadModelFile], None]
    ) -> ModelFilePart:
        question = ReadModelFile(str(next(self._calls)), model, file, offset)
        answered = asyncio.get_running_loop().create_future()
        self._asked[question.call] = answered
        send(question)
        try:
            part: ModelFilePart = await answered
            return part
        finally:
            del self._asked[question.call]

    def __repr__(self) -> str:
        return f"<TextFiles of {len(self._complete)} models in {self._directory}>"
