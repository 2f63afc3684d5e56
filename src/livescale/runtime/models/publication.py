"""The models of a running pool: how they are published and withdrawn.

What follows from that (copies, instances, requests) is decided in `control`; HTTP is the
gateway's. A model's files are read by a process of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from livescale.common.interpreter import module_words
from livescale.common.settings import ConfigError
from livescale.config.model import ModelConfig
from livescale.config.pool import PoolConfig
from livescale.config.reading import changed_model, model_of
from livescale.control.reports.status import ControllerStatus
from livescale.engine.files.model_files import model_spec
from livescale.messages.events import AnyEvent, ModelAdded, ModelChanged, ModelRemoved
from livescale.runtime.models.catalog import manifests_of, model_policy, published
from livescale.runtime.models.restoration import state_of, survives_restart
from livescale.runtime.models.state_directory import write_state
from livescale.runtime.wire import protocol
from livescale.runtime.wire.boot import PrepareBoot, Status
from livescale.runtime.wire.wire_channel import FRAME_BYTES_MAX
from livescale.telemetry.history.changes import Change, HoldingEnded
from livescale.telemetry.history.holding_history import Ending
from livescale.values.types import InstanceState, ModelSpec

_log = logging.getLogger(__name__)
# Placements that keep every model in host memory, where there is any.
_KEEPING = ("spread", "all")


class _Refusal(Exception):
    """The model is not added, changed or removed; `problem` and the message say why."""

    def __init__(self, problem: protocol.ModelProblem, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


class Publication:
    """All models of the pool, those that are prepared and those that are leaving included."""

    def __init__(
        self,
        catalog: protocol.Catalog,
        config: PoolConfig,
        status: Callable[[], ControllerStatus],
        push: Callable[[AnyEvent], None],
        announce: Callable[[], None],
        *,
        has_agents: bool,
    ) -> None:
        """`status` is the controller's, `push` gives it an event; `announce` is called when the
        catalog changed."""
        self.models = {model.entry.spec.name: model for model in catalog.models}
        #: kept from an earlier start, and cannot be served
        self.unserved = {model.settings.name: model for model in catalog.unserved}
        self._config = config
        self._status = status
        self._keeps_copies = has_agents and config.placement in _KEEPING
        self._push = push
        self._announce = announce
        self._preparing: dict[str, str] = {}
        #: models that were added and whose first copy is not there yet
        self._awaited: dict[str, asyncio.Future[None]] = {}
        #: what is in the state directory is what the pool has
        self._is_kept = config.state is not None
        self._keeping = asyncio.Lock()

    def entry(self, model: str) -> protocol.CatalogEntry:
        """KeyError for a model that is not in the pool."""
        return self.models[model].entry

    def kept(self) -> protocol.Catalog:
        """All models that the controller's next life needs to know."""
        unserved = tuple(self.unserved.values())
        return protocol.Catalog(tuple(self.models.values()), unserved=unserved)

    def catalog(self) -> protocol.Catalog:
        """All models as gateways are told."""
        preparing, kept = tuple(self._preparing.items()), self.kept()
        return protocol.Catalog(tuple(map(self._shown, kept.models)), preparing, kept.unserved)

    def _shown(self, model: protocol.PublishedModel) -> protocol.PublishedModel:
        survives = survives_restart(self._config, model.settings, is_kept=self._is_kept)
        is_staying = survives and not model.is_leaving
        return msgspec.structs.replace(model, survives_restart=is_staying)

    # -- publishing and withdrawing -------------------------------------------------------------

    async def answer(
        self, asked: protocol.AddModel | protocol.ChangeModel | protocol.RemoveModel
    ) -> protocol.ModelAnswer:
        """Publish, change or withdraw a model; what came of it. A model that was added is in host
        memory by then, where it is kept there; other limits hold and are kept; a model that was
        removed takes no new requests."""
        name = asked.name
        try:
            if isinstance(asked, protocol.AddModel):
                model = self._model_config(asked)
                name = model.name
                await self._publish(model)
            elif isinstance(asked, protocol.ChangeModel):
                self._change(asked)
            else:
                self._remove(name)
        except _Refusal as error:
            return protocol.ModelAnswer(asked.call, name, error.problem, str(error))
        await self.keep()
        return protocol.ModelAnswer(asked.call, name)

    async def keep(self) -> None:
        """Write down for the next start what is in the pool now. One writer at a time."""
        if self._config.state is None:
            return
        async with self._keeping:
            state = state_of(self._config, self.kept())
            try:
                await asyncio.to_thread(write_state, Path(self._config.state), state)
            except OSError as error:
                is_kept = False
                if self._is_kept:
                    _log.error("Saving the state in %s failed: %s", self._config.state, error)
            else:
                is_kept = True
            if is_kept != self._is_kept:
                self._is_kept = is_kept
                self._announce()

    def gone(self, name: str) -> None:
        """Nothing of a withdrawn model is left in the cluster."""
        del self.models[name]
        self._announce()

    def observe(self, changes: Sequence[Change]) -> None:
        """Look whether what is waited for has come. To be called after every step."""
        for change in changes:
            held = change.holding if isinstance(change, HoldingEnded) else None
            if held is None or held.instance is not None or held.ending is not Ending.FAILED:
                continue
            if held.model in self._awaited:
                self._fail(held.model, f"the copy to host memory failed: {held.reason}")
        for name in [name for name in self._awaited if not self._lacks_copy(name)]:
            self._awaited.pop(name).set_result(None)

    def unready(self) -> tuple[str, ...]:
        """Models that have less than they should have at least."""
        return tuple(
            name
            for name, model in self.models.items()
            if not model.is_leaving
            and (self._serving(name) == 0 if model.policy.instances_min else self._lacks_copy(name))
        )

    # -- helpers, in the order used -------------------------------------------------------------

    def _model_config(self, asked: protocol.AddModel) -> ModelConfig:
        fields: dict[object, object] = {"path": asked.path}
        fields |= {"name": asked.name} if asked.name else {}
        fields.update(asked.settings)
        try:
            model = model_of(fields, self._config)
        except ConfigError as error:
            raise _Refusal(protocol.ModelProblem.INVALID, str(error)) from None
        if self._of(model.name) or model.name in self._preparing:
            reason = f"the pool has a model '{model.name}' already"
            raise _Refusal(protocol.ModelProblem.EXISTS, reason)
        return model

    async def _publish(self, model: ModelConfig) -> None:
        self._preparing[model.name] = model.path
        self._announce()
        try:
            entry = await self._prepare(model)
        except BaseException:  # whatever it is, the name must be free again
            del self._preparing[model.name]
            self._announce()
            raise
        del self._preparing[model.name]
        for warning in entry.warnings:
            _log.warning("%s", warning)
        self.unserved.pop(model.name, None)
        parts = published(self._config, model, entry)
        awaited = {
            part.entry.spec.name: asyncio.get_running_loop().create_future() for part in parts
        }
        for part in parts:
            self.models[part.entry.spec.name] = part
            self._push(ModelAdded(part.policy))
        self._awaited |= awaited
        self._announce()
        await asyncio.gather(*awaited.values())

    async def _prepare(self, model: ModelConfig) -> protocol.CatalogEntry:
        """Let a process of its own read the model's files."""
        words = module_words("livescale.runtime.children.child", "prepare", self._config.log_level)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, limit=FRAME_BYTES_MAX
            )
        except OSError as error:
            reason = f"no process starts that reads {model.path}: {error.strerror}. Try again later"
            raise _Refusal(protocol.ModelProblem.FAILED, reason) from error
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(PrepareBoot(self._config, model)) + b"\n")
        try:
            status = msgspec.json.decode(await process.stdout.readline(), type=Status)
        except (msgspec.MsgspecError, ValueError) as error:
            _log.warning("preparing %s: %s", model.path, error)
            status = Status()
        process.stdin.close()
        await process.wait()
        if status.entry is None:
            problem = (
                protocol.ModelProblem.INVALID if status.fatal else protocol.ModelProblem.FAILED
            )
            reason = status.fatal or f"reading {model.path} ended with {process.returncode}"
            raise _Refusal(problem, reason)
        for part in manifests_of(model, status.entry.manifest):
            self._check_room(model_spec(part))
        return status.entry

    def _check_room(self, spec: ModelSpec) -> None:
        """A model that is to be kept in host memory needs room there."""
        if not self._keeps_copies:
            return
        size = spec.size_bytes * spec.tp_size
        room = self._status().host_room_bytes
        if size > room:
            raise _Refusal(
                protocol.ModelProblem.INVALID,
                f"model {spec.name} needs {size} bytes, above the {room} free bytes of "
                "the largest host memory. Raise host_memory_bytes",
            )

    def _change(self, asked: protocol.ChangeModel) -> None:
        name, parts = asked.name, self._staying(asked.name)
        try:
            settings = changed_model(parts[0].settings, asked.settings, self._config)
        except ConfigError as error:
            raise _Refusal(protocol.ModelProblem.INVALID, str(error)) from None
        for part in parts:
            policy = model_policy(self._config, settings, part.entry)
            changed = msgspec.structs.replace(part, policy=policy, settings=settings)
            self.models[part.entry.spec.name] = changed
            self._push(ModelChanged(policy))
        self._announce()
        _log.info("model %s has other limits: %s", name, dict(asked.settings))

    def _remove(self, name: str) -> None:
        if self.unserved.pop(name, None) is not None:
            self._announce()
        else:
            for part in self._staying(name):
                self._withdraw(part.entry.spec.name, "the model was removed")

    def _of(self, name: str) -> list[protocol.PublishedModel]:
        """The model that clients know by this name, or its stages."""
        return [model for model in self.models.values() if model.entry.spec.offered_as == name]

    def _staying(self, name: str) -> list[protocol.PublishedModel]:
        parts = self._of(name)
        if parts and not any(part.is_leaving for part in parts):
            return parts
        reason = f"the pool has no model '{name}'"
        if name in self.unserved:
            reason = f"model '{name}' is not served: {self.unserved[name].problem}"
        raise _Refusal(protocol.ModelProblem.UNKNOWN, reason)

    def _lacks_copy(self, name: str) -> bool:
        if not self._keeps_copies:
            return False  # storage does
        status = self._status().models.get(name)
        return status is None or not (status.host_copies or self._serving(name))

    def _serving(self, name: str) -> int:
        status = self._status().models.get(name)
        return 0 if status is None else status.instances.get(InstanceState.SERVING, 0)

    def _withdraw(self, name: str, reason: str) -> None:
        if name in self._awaited:
            self._fail(name, reason)
            return
        self.models[name] = msgspec.structs.replace(self.models[name], is_leaving=True)
        self._push(ModelRemoved(name))
        self._announce()

    def _fail(self, name: str, reason: str) -> None:
        awaited = self._awaited.pop(name)
        awaited.set_exception(_Refusal(protocol.ModelProblem.FAILED, reason))
        # Of a model with stages none can be used without the others.
        for part in self._of(self.models[name].entry.spec.offered_as):
            if not self.models[part.entry.spec.name].is_leaving:
                self._withdraw(part.entry.spec.name, reason)
