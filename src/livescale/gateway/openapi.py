"""What the endpoints take and answer, as an OpenAPI document that programs can read.

Made from the table of endpoints and from the types that bodies are decoded into, so that there is
nothing to keep in step. Ranges that depend on the model are not in it.
"""

from __future__ import annotations

import http
from collections.abc import Sequence
from typing import Any

import msgspec

from livescale import __version__
from livescale.gateway.endpoints import Endpoint
from livescale.gateway.errors import ErrorBody
from livescale.gateway.keys import KeyRing
from livescale.gateway.parameters import HARMLESS
from livescale.gateway.sampling import RANGES
from livescale.gateway.schema import GenerationBody

_BODY_ERRORS = (408, 413, 415)
"""Statuses of every request that has a body, and of none other."""
_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_KEY = "key"


def document(endpoints: Sequence[Endpoint], keys: KeyRing) -> dict[str, Any]:
    """The OpenAPI 3.1 document. It says where a key is needed now."""
    types: list[type[msgspec.Struct]] = [ErrorBody]
    for endpoint in endpoints:
        types += [
            kind
            for kind in (endpoint.body, endpoint.answer)
            if isinstance(kind, type) and kind not in types
        ]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    for kind in types:
        if issubclass(kind, GenerationBody):
            _add_values(schemas[kind.__name__]["properties"])
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        operation = _operation(endpoint, path, needs_key=keys.needs_key(path))
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas}
    if any("security" in operation for path in paths.values() for operation in path.values()):
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "LiveScale", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _operation(endpoint: Endpoint, path: str, *, needs_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": (endpoint.handler.__doc__ or "").strip().partition("\n")[0],
        "responses": _responses(endpoint, path, needs_key=needs_key),
    }
    if path != endpoint.path:
        name = path[path.index("{") + 1 : path.index("}")]
        operation["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        ]
    if endpoint.body is not None:
        schema = _schema(endpoint.body)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if needs_key:
        operation["security"] = [{_KEY: []}]
    return operation


def _responses(endpoint: Endpoint, path: str, *, needs_key: bool) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        content = {_JSON: {"schema": _schema(endpoint.answer)}}
    if endpoint.is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answer = {"description": http.HTTPStatus(endpoint.status).phrase, "content": content}
    errors = {431, *endpoint.errors}
    if needs_key:
        errors.add(401)
    if path.startswith("/admin"):
        errors.add(403)
    if endpoint.body is not None:
        errors |= {400, *_BODY_ERRORS}
    return {str(endpoint.status): answer, **{str(error): _error(error) for error in sorted(errors)}}


def _error(status: int) -> dict[str, Any]:
    phrase = http.HTTPStatus(status).phrase
    return {"description": phrase, "content": {_JSON: {"schema": _schema(ErrorBody)}}}


def _schema(kind: type[msgspec.Struct] | dict[str, Any]) -> dict[str, Any]:
    return kind if isinstance(kind, dict) else {"$ref": _REF.format(name=kind.__name__)}


def _add_values(properties: dict[str, Any]) -> None:
    """What is looked at only behind the types: ranges of numbers, and values that are accepted of
    parameters that are not available."""
    for name, allowed in RANGES.items():
        for shape in properties[name]["anyOf"]:
            if shape["type"] == "number":
                shape |= {"minimum": allowed.low, "maximum": allowed.high}
    for name, values in HARMLESS.items():
        properties.setdefault(name, {"enum": [None, *values]})
