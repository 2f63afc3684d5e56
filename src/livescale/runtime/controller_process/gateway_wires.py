"""The gateways of a pool, as its controller has them: their wires, and what each of them asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from livescale.messages import commands, events
from livescale.runtime.lease.tenure import Tenure
from livescale.runtime.models.publication import Publication
from livescale.runtime.models.text_files import read_part
from livescale.runtime.wire import protocol
from livescale.runtime.wire.gateway_rights import is_its_request, may_have_name
from livescale.runtime.wire.wire_channel import Wire
from livescale.telemetry.record.record import RequestLine
from livescale.values.types import RequestId, WorkerRef, gateway_of

_log = logging.getLogger(__name__)

_Wire = Wire[protocol.ToController]
_Question = protocol.AddModel | protocol.ChangeModel | protocol.RemoveModel | protocol.ReadModelFile


class GatewayWires:
    """Those that are connected. `push` takes their events, `over` the line of each request that is
    over, and `examine` asks all members what they hold and names these."""

    def __init__(
        self,
        tenure: Tenure,
        publication: Publication,
        push: Callable[[events.AnyEvent], None],
        over: Callable[[RequestLine], None],
        examine: Callable[[protocol.Examine], Iterable[WorkerRef]],
    ) -> None:
        self._tenure = tenure
        self._publication = publication
        self._push = push
        self._over = over
        self._examine = examine
        self._wires: dict[str, _Wire] = {}
        #: who asked what the members hold
        self._examiners: dict[str, _Wire] = {}
        #: answers that are being worked out
        self._answering: set[asyncio.Task[None]] = set()

    def send(self, message: protocol.PoolStatus | protocol.Catalog | protocol.Peers) -> None:
        """To all of them."""
        for wire in self._wires.values():
            wire.send(message)

    def send_for(
        self, request: RequestId, command: commands.Dispatch | commands.FailRequest
    ) -> None:
        """To the gateway that answers for the request. One that is gone needs nothing: its
        GatewayLost is on the way and ends all its requests."""
        wire = self._wires.get(gateway_of(request))
        if wire is not None:
            wire.send(command)

    def examined(self, answer: protocol.Examined) -> None:
        """A member has answered: pass that on to who asked."""
        if answer.call in self._examiners:
            self._examiners[answer.call].send(answer)

    async def serve(
        self,
        hello: protocol.GatewayHello,
        wire: _Wire,
        known: Iterable[protocol.Catalog | protocol.Peers | protocol.PoolStatus],
    ) -> None:
        """Serve a gateway, which is told what is `known` first, until its wire ends."""
        name = hello.gateway
        if not may_have_name(name, wire, self._wires):
            _log.warning("A second gateway named %s was disconnected", name)
            wire.close()
            return
        if name in self._wires:
            # It has noticed first that its wire had broken, and announces all that is not over.
            self._wires[name].break_off("it has connected again")
            self._forget(name)
        self._wires[name] = wire
        for one in known:
            wire.send(one)
        async for message in self._tenure.listen(wire):
            if not self._received(name, wire, message):
                wire.error = f"it sent {type(message).__name__}, which is not its to send"
                wire.close()
                break
        _log.info("gateway %s is disconnected: %s", name, wire.error)
        if self._wires.get(name) is wire:
            self._forget(name)

    # -- helpers, in the order used -------------------------------------------------------------

    def _received(self, name: str, wire: _Wire, message: protocol.ToController) -> bool:
        """False for what no gateway sends, and for what is of another one's requests."""
        request = _request_of(message)
        if request is not None and not is_its_request(name, request):
            return False
        if isinstance(message, protocol.RequestTimed):
            self._over(message.line)
        elif isinstance(
            message, events.RequestArrived | events.RequestCancelled | events.RequestEnded
        ):
            self._push(message)
        elif isinstance(message, _Question):
            task = asyncio.create_task(self._answer(wire, message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif isinstance(message, protocol.Examine):
            self._examiners[message.call] = wire
            wire.send(protocol.Examining(message.call, tuple(sorted(self._examine(message)))))
        else:
            return False
        return True

    async def _answer(self, wire: _Wire, asked: _Question) -> None:
        if isinstance(asked, protocol.ReadModelFile):
            model = self._publication.models.get(asked.model)
            directory = "" if model is None else model.entry.directory
            wire.send(await asyncio.to_thread(read_part, directory, asked))
        else:
            wire.send(await self._publication.answer(asked))

    def _forget(self, name: str) -> None:
        """No one waits for what it asked."""
        wire = self._wires.pop(name)
        for call in [call for call, asker in self._examiners.items() if asker is wire]:
            del self._examiners[call]
        self._push(events.GatewayLost(name))

    def __repr__(self) -> str:
        return f"<GatewayWires {', '.join(self._wires) or 'empty'}>"


def _request_of(message: protocol.ToController) -> RequestId | None:
    """Which request the message is about (None: about none)."""
    if isinstance(message, protocol.RequestTimed):
        return message.line.request
    if isinstance(message, events.RequestArrived | events.RequestCancelled | events.RequestEnded):
        return message.request
    return None
