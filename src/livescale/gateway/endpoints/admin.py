"""The administrators' endpoints: the models of the pool, publishing, changing, withdrawing one.

With admin keys one of them is needed (`keys.py`). Without any keys only programs of the machine
itself are let in, and no web page that one of its browsers shows; with API keys alone there is no
administration: who may generate may not withdraw models, and no program of the machine gets more
than a client with a key. What becomes of a model is the backend's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from livescale.common.settings import ConfigError, Setting, read_values
from livescale.config.model import CHANGEABLE_SETTINGS, MODEL_SETTINGS
from livescale.gateway.contract import errors
from livescale.gateway.contract.admission import AtMost, refusals_answered
from livescale.gateway.contract.answers import json_answer
from livescale.gateway.contract.backend import (
    Backend,
    ModelPhase,
    ModelRefused,
    ModelStatus,
    NewModel,
    SettingValue,
    Unavailable,
)
from livescale.gateway.contract.keys import KeyRing
from livescale.gateway.contract.schema import decode_as
from livescale.gateway.metrics.totals import Totals
from livescale.gateway.requests.served import ServedModels
from livescale.gateway.text.text import TextCodec, TextWork

NAME_CHARS_MAX = 200
PATH_CHARS_MAX = 4096
KEY_CHARS_MAX = 64
"""No setting has a longer name; looking for the nearest one takes time."""
CHANGING_MAX = 8
"""Models that are being published or withdrawn at once."""
RETRY_AFTER_S = 5.0
_TOO_MANY = "too many models are being published or withdrawn"

_CHANGEABLE = tuple(setting.name for setting in CHANGEABLE_SETTINGS)
_FIXED = tuple(setting.name for setting in MODEL_SETTINGS if setting.name not in _CHANGEABLE)


class AdministeredModels(msgspec.Struct):
    """Response of GET /admin/models."""

    data: list[ModelStatus]
    object: str = "list"


class RemovedModel(msgspec.Struct):
    """Response of DELETE /admin/models/{name}."""

    name: str
    object: str = "model"
    removed: bool = True


@dataclass(slots=True, eq=False)
class Administration:
    """The endpoints below /admin. `is_local`: only programs of this machine reach the server."""

    backend: Backend
    served: ServedModels
    totals: Totals
    has_slo: bool
    read_body: Callable[[Request], Awaitable[bytes]]
    is_local: bool
    keys: KeyRing
    _busy: AtMost = field(default_factory=lambda: AtMost(CHANGING_MAX, _TOO_MANY, RETRY_AFTER_S))

    async def list_models(self, request: Request) -> Response:
        """GET /admin/models"""
        self._check_open(request)
        states = self.backend.model_states()
        return json_answer(AdministeredModels(await self._shown(*states)))

    async def show_model(self, request: Request) -> Response:
        """GET /admin/models/{name}"""
        self._check_open(request)
        return await self._answer(request.path_params["model"])

    async def add_model(self, request: Request) -> Response:
        """POST /admin/models: 201 when the model is in the pool and can be asked for."""
        self._check_change(request)
        model = read_new_model(await self.read_body(request))
        with self._busy.one_more():
            name = model.name or Path(model.directory).name
            states = self.backend.model_states()
            if any(s.name == name and s.state is not ModelPhase.FAILED for s in states):
                raise errors.model_exists(name)
            # What hashing gigabytes would only show at its end, and what the pool does not look at.
            await asyncio.to_thread(_check_files, Path(model.directory), self.served.work)
            with _changes_answered(name), refusals_answered():
                name = await self.backend.add_model(model)
            await self.served.settled()
            problem = self.served.problem(name)
            if problem is not None:
                with contextlib.suppress(ModelRefused, Unavailable):
                    await self.backend.remove_model(name)
                raise errors.invalid(errors.cut(problem), "path")
            return await self._answer(name, 201)

    async def change_model(self, request: Request) -> Response:
        """PATCH /admin/models/{name}: 200 when the new limits hold."""
        self._check_change(request)
        name = self._state(request.path_params["model"]).name
        changes = read_changes(await self.read_body(request))
        with self._busy.one_more(), _changes_answered(name), refusals_answered():
            await self.backend.change_model(name, changes)
        return await self._answer(name)

    async def remove_model(self, request: Request) -> Response:
        """DELETE /admin/models/{name}: 202 when it takes no more requests."""
        self._check_change(request)
        state = self._state(request.path_params["model"])
        with self._busy.one_more(), _changes_answered(state.name), refusals_answered():
            await self.backend.remove_model(state.name)
        return json_answer(RemovedModel(state.name), 202)

    # -- helpers, in the order used ---------------------------------------------------------

    def _check_open(self, request: Request) -> None:
        """Raises ApiError (403)."""
        if self.keys.digests.admin:
            return  # and one of them was given
        if self.keys.digests.api:
            raise errors.admin_closed(
                "Administration needs an admin key, because the pool has API keys. Set "
                "admin_key_file on the head node"
            )
        if not self.is_local:
            raise errors.admin_closed(
                "Administration needs a loopback address or admin keys. Set "
                "admin_key_file on the head node"
            )
        # A web page can make its own name mean this machine, but not this machine's name its own.
        if not _is_this_machine(request.headers.get("host", "")):
            raise errors.admin_closed(
                "Without keys, the Host header must name this machine. Use localhost"
            )

    async def _answer(self, name: str, status: int = 200) -> Response:
        """A model as it is now. Raises ApiError (404)."""
        [shown] = await self._shown(self._state(name))
        return json_answer(shown, status)

    async def _shown(self, *states: ModelStatus) -> list[ModelStatus]:
        """With what gateways know, too."""
        sums = await self.totals.now()
        for state in states:
            counts = sums.models.get(state.name)
            if counts is not None:
                state.usage.requests = counts.ended
                state.usage.prompt_tokens = counts.prompt_tokens
                state.usage.generation_tokens = counts.generation_tokens
                if self.has_slo:
                    state.usage.slo_met = counts.slo["all", True]
            state.problem = state.problem or self.served.problem(state.name)
            state.warnings = (*state.warnings, *self.served.warnings(state.name))
        return list(states)

    def _state(self, name: str) -> ModelStatus:
        """Raises ApiError (404)."""
        states = {state.name: state for state in self.backend.model_states()}
        if name not in states:
            raise errors.model_not_found(name, states)
        return states[name]

    def _check_change(self, request: Request) -> None:
        """Raises ApiError (403, 415)."""
        self._check_open(request)
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise errors.wrong_media_type()


def read_changes(raw: bytes) -> dict[str, SettingValue]:
    """The body of PATCH /admin/models/{name}. Raises ApiError (400, 409) that names the field."""
    fields = decode_as(raw, dict[str, object])
    if not fields:
        raise errors.invalid(
            f"A setting to change is missing. Give at least one of {', '.join(_CHANGEABLE)}"
        )
    for name in fields:
        if name in _FIXED:
            message = (
                f"{name} cannot be changed while the model is in the pool. Remove the "
                f"model and publish it again. Changeable: {', '.join(_CHANGEABLE)}"
            )
            raise errors.ApiError(409, message, param=name, code="not_changeable")
    return _checked(fields, CHANGEABLE_SETTINGS)


def _checked(
    fields: Mapping[str, object], settings: tuple[Setting, ...]
) -> dict[str, SettingValue]:
    """Raises ApiError (400) that names the field."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if len(name) > KEY_CHARS_MAX:
            raise errors.invalid(f"unknown setting {errors.quoted(name)}")
        try:
            values |= read_values({name: value}, settings, "")
        except ConfigError as error:
            raise errors.invalid(errors.cut(str(error)), name) from None
    return values


def new_model_schema() -> dict[str, Any]:
    """The body of POST /admin/models as JSON Schema."""
    return _schema_of(MODEL_SETTINGS)


def changes_schema() -> dict[str, Any]:
    """The body of PATCH /admin/models/{name} as JSON Schema."""
    return {**_schema_of(CHANGEABLE_SETTINGS), "minProperties": 1}


def _schema_of(settings: tuple[Setting, ...]) -> dict[str, Any]:
    properties = {setting.name: _shape_of(setting) for setting in settings}
    for setting in settings:
        shape: dict[str, Any] = properties[setting.name]
        if setting.type == "int":
            shape |= {"minimum": setting.about.lower, "maximum": setting.about.upper}
        if setting.is_optional:
            shape["type"].append("null")
        shape["description"] = setting.about.help
    return {
        "type": "object",
        "properties": properties,
        "required": [setting.name for setting in settings if setting.is_required],
        "additionalProperties": False,
    }


def _shape_of(setting: Setting) -> dict[str, Any]:
    if setting.keys:
        return {**_schema_of(setting.keys), "type": ["object"]}
    return {"type": ["string" if setting.type == "str" else "integer"]}


def read_new_model(raw: bytes) -> NewModel:
    """The body of POST /admin/models. Raises ApiError (400) that names the field."""
    fields = decode_as(raw, dict[str, object])
    settings = _checked(fields, MODEL_SETTINGS)
    if "path" not in settings:
        raise errors.invalid("path is missing. Give the directory of the model", "path")
    path, name = str(settings.pop("path")), str(settings.pop("name", ""))
    if not path.startswith("/") or "\0" in path or len(path) > PATH_CHARS_MAX:
        raise errors.invalid(f"path is {errors.quoted(path)}. Give an absolute path", "path")
    if len(name or Path(path).name) > NAME_CHARS_MAX or not (name or Path(path).name).strip():
        raise errors.invalid(f"a model's name has 1 to {NAME_CHARS_MAX} characters", "name")
    if not name.isprintable() or name != name.strip():
        raise errors.invalid(
            f"{errors.quoted(name)} is an invalid name. Use printable characters", "name"
        )
    return NewModel(path, name, settings)


def _check_files(directory: Path, work: TextWork) -> None:
    """The directory is one, and its tokenizer can be read. Raises ApiError (400)."""
    try:
        if not directory.is_dir():
            raise errors.invalid(f"{errors.quoted(str(directory))} is not a directory", "path")
        TextCodec.load(directory, work)
    except (ValueError, OSError) as error:
        raise errors.invalid(errors.cut(str(error)), "path") from None


@contextmanager
def _changes_answered(name: str) -> Iterator[None]:
    """A ModelRefused raised inside leaves as an ApiError."""
    try:
        yield
    except ModelRefused as refused:
        raise _refusal(refused, name) from refused


def _refusal(refused: ModelRefused, name: str) -> errors.ApiError:
    if refused.problem == "exists":
        return errors.model_exists(name)
    if refused.problem == "unknown":
        return errors.model_not_found(name)
    if refused.problem == "invalid":
        return errors.invalid(errors.cut(str(refused)), code="invalid_model")
    return errors.unavailable(errors.cut(str(refused)), code="model_failed")


def _is_this_machine(host: str) -> bool:
    """The Host header names the loopback interface, with or without a port."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
