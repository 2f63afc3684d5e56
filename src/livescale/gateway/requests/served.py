"""The models that requests can name now: cards with their tokenizers and templates.

Follows the backend: a model that it withdraws is refused at once, a new one is served when its
files are read, which happens beside the event loop. No requests, no generation.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from livescale.gateway.contract.backend import Backend, ModelCard, ModelPhase
from livescale.gateway.contract.errors import model_not_found
from livescale.gateway.metrics.metrics import Metrics
from livescale.gateway.requests.sampling import check_defaults
from livescale.gateway.text.text import TextCodec, TextWork

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with what turns its text into ids and back."""

    card: ModelCard
    codec: TextCodec

    @classmethod
    def load(cls, card: ModelCard, work: TextWork) -> ServedModel:
        """Read the tokenizer's files. Raises ValueError naming what is missing or broken."""
        check_defaults(card)
        try:
            served = cls(card, TextCodec.load(card.directory, work))
        except OSError as error:
            raise ValueError(f"{card.directory} cannot be read: {error}") from error
        for warning in served.warnings:
            log.warning("%s", warning)
        return served

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an administrator should know of the model's files though it is served."""
        left_out = self.codec.left_out
        if not left_out:
            return ()
        return (
            f"model {self.card.name}: the chat template leaves out messages of role "
            f"{', '.join(left_out)}. The model does not receive them",
        )


class ServedModels:
    """What is served, by name. Lives on the gateway's event loop.

    `metrics` counts the models that are on offer, and those that are leaving until they are gone.
    """

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        """Reads all that is on offer. Raises ValueError naming the file that is wrong."""
        self._backend = backend
        self._metrics = metrics
        self.work = TextWork()
        self._served = {card.name: ServedModel.load(card, self.work) for card in backend.models()}
        #: offered models whose files cannot be read, and why
        self._problems: dict[ModelCard, str] = {}
        self._reading: asyncio.Task[None] | None = None
        backend.watch_models(self._changed)

    def get(self, name: str) -> ServedModel:
        """The model. Raises ApiError (404)."""
        served = self._served.get(name)
        if served is None:
            raise model_not_found(name, self._served)
        return served

    def cards(self) -> list[ModelCard]:
        return [served.card for served in self._served.values()]

    def prompt_tokens_max(self) -> int:
        """No model takes a prompt of more tokens."""
        return max((card.model_tokens_max for card in self.cards()), default=0)

    def text_chars_max(self) -> int | None:
        """No model takes a prompt of more characters (None: not known of all of them)."""
        longest = 0
        for served in self._served.values():
            chars = served.codec.bounds.chars_max(served.card.model_tokens_max)
            if chars is None:
                return None
            longest = max(longest, chars)
        return longest or None

    async def settled(self) -> None:
        """Return when everything that is on offer has been read, or cannot be."""
        if self._reading is not None:
            await asyncio.shield(self._reading)

    def problem(self, name: str) -> str | None:
        """Why an offered model is not served (None: it is, or it is not offered)."""
        return next((p for card, p in self._problems.items() if card.name == name), None)

    def warnings(self, name: str) -> tuple[str, ...]:
        """What should be known of the files of a model though it is served."""
        served = self._served.get(name)
        return () if served is None else served.warnings

    def __repr__(self) -> str:
        return f"<ServedModels {', '.join(self._served) or 'none'}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _changed(self) -> None:
        offered = set(self._backend.models())
        self._served = {n: s for n, s in self._served.items() if s.card in offered}
        self._problems = {card: why for card, why in self._problems.items() if card in offered}
        self._metrics.keep(
            [card.name for card in self._backend.models()]
            + [
                state.name
                for state in self._backend.model_states()
                if state.state is ModelPhase.LEAVING
            ]
        )
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_new())

    async def _read_new(self) -> None:
        while (card := self._unread()) is not None:
            try:
                served = await asyncio.to_thread(ServedModel.load, card, self.work)
            except ValueError as error:
                log.error("model %s cannot be served: %s", card.name, error)
                self._problems[card] = str(error)
            else:
                if card in self._backend.models():
                    self._served[card.name] = served

    def _unread(self) -> ModelCard | None:
        """A model that is on offer and was not read yet."""
        for card in self._backend.models():
            served = self._served.get(card.name)
            if card not in self._problems and (served is None or served.card != card):
                return card
        return None
