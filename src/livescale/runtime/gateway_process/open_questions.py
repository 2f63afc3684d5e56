"""Administrators' questions that the controller has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from livescale.gateway.contract.backend import ModelRefused, Unavailable
from livescale.runtime.wire.protocol import AddModel, ChangeModel, ModelAnswer, RemoveModel

Question = AddModel | ChangeModel | RemoveModel


class OpenQuestions:
    """Who waits for which answer, by the call that both name. Lives on the gateway's event loop."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._asked: dict[str, asyncio.Future[ModelAnswer]] = {}
        self._calls = itertools.count(1)

    def next_call(self) -> str:
        """A name for one more question."""
        return f"{self._gateway}-{next(self._calls)}"

    async def ask(
        self,
        question: Question,
        send: Callable[[Question], None],
    ) -> ModelAnswer:
        """Send it and wait. Raises ModelRefused, or Unavailable when no answer will come."""
        answered = asyncio.get_running_loop().create_future()
        self._asked[question.call] = answered
        send(question)
        try:
            answer: ModelAnswer = await answered
        finally:
            self._asked.pop(question.call, None)
        if answer.problem is not None:
            raise ModelRefused(answer.problem.value, answer.reason)
        return answer

    def answer(self, message: ModelAnswer) -> None:
        """The controller has answered; perhaps no client waits any more."""
        answered = self._asked.get(message.call)
        if answered is not None and not answered.done():
            answered.set_result(message)

    def leave_unanswered(self) -> None:
        """The controller is gone: it answers nothing."""
        for answered in self._asked.values():
            if not answered.done():
                reason = (
                    "the controller restarted before it answered. Check the models with "
                    "GET /admin/models"
                )
                answered.set_exception(Unavailable(reason))

    def __repr__(self) -> str:
        return f"<OpenQuestions {sorted(self._asked)}>"
