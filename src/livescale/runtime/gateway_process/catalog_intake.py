"""What a gateway does with the catalogs that it receives: the latest one counts, once the files
that text is tokenized with are here (`text_files.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from livescale.runtime.gateway_process.model_shelf import ModelShelf
from livescale.runtime.models.text_files import TextFiles
from livescale.runtime.wire.protocol import Catalog, CatalogEntry, ModelFilePart, ReadModelFile

_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class CatalogIntake:
    """The gateway's `shelf`, beginning with `catalog`, and what keeps it up to date. `taken` is
    called whenever the shelf has other models."""

    def __init__(
        self, catalog: Catalog, files_directory: str | None, taken: Callable[[], None]
    ) -> None:
        """`files_directory`: for the files of models that are on another machine (None: the
        models' directories are here)."""
        self._files = None if files_directory is None else TextFiles(Path(files_directory))
        self._fetching: asyncio.Task[None] | None = None
        self._taken = taken
        #: the shelf has models that the controller has told of, or that are here
        self.has_models = self._files is None
        self.shelf = ModelShelf(catalog, self._directory_of)

    def receive(self, catalog: Catalog, send: Callable[[ReadModelFile], None]) -> None:
        """Files that are not here are asked for with `send`."""
        if self._fetching is not None:
            self._fetching.cancel()
        if self._files is None or self._files.has_all(catalog):
            self._take(catalog)
        else:
            self._fetching = asyncio.create_task(self._fetch(self._files, catalog, send))

    def answer(self, part: ModelFilePart) -> None:
        """The controller has sent a part of a file."""
        if self._files is not None:
            self._files.answer(part)

    def _directory_of(self, entry: CatalogEntry) -> Path:
        """Where the files of the model are that its text is tokenized with."""
        return Path(entry.directory) if self._files is None else self._files.directory_of(entry)

    async def _fetch(
        self, files: TextFiles, catalog: Catalog, send: Callable[[ReadModelFile], None]
    ) -> None:
        while True:
            try:
                await files.fetch(catalog, send)
                break
            except OSError as error:  # a full disk, say; without its models a gateway is of no use
                _log.error("Files of models cannot be kept (%s). The gateway tries again", error)
                await asyncio.sleep(_RETRY_S)
        self._take(catalog)

    def _take(self, catalog: Catalog) -> None:
        self.shelf.take(catalog)
        self.has_models = True
        self._taken()

    def __repr__(self) -> str:
        return f"<CatalogIntake of {self.shelf}>"
